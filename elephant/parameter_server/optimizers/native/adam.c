/* Adam's update of a block of weights, in one pass over memory.
 *
 * numpy takes one for each of twelve operations (`Adam.update_block` in elephant/parameter_server/optimizers/rules.py).
 * They are the same here, in the same order, and none is contracted: the weights have the same bits.
 */
#include <math.h>
#include <stdint.h>

/* The compiler writes the loop for several kinds of processors, and the loader takes the one that is there. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

__attribute__((visibility("default"))) FOR_EACH_PROCESSOR void elephant_adam(
    int64_t count, float *restrict values, const float *restrict gradient, float *restrict momentum,
    float *restrict velocity, float rate, float new_1, float new_2, float epsilon) {
    for (int64_t i = 0; i < count; i++) {
        float mean = momentum[i] + (gradient[i] - momentum[i]) * new_1;
        float square = velocity[i] + (gradient[i] * gradient[i] - velocity[i]) * new_2;
        momentum[i] = mean;
        velocity[i] = square;
        values[i] -= mean * rate / (sqrtf(square) + epsilon);
    }
}
