/* Average of gradients over the ranks of one host: a kernel of TensorFlow.
 *
 * It knows TensorFlow by its C API alone, and looks the functions up in the library that the process has loaded. So it
 * is built without TensorFlow, and one binary serves all versions.
 *
 * In each step every rank writes its gradients, times its weight, into its own block of the memory that all share,
 * and publishes the step's number. When all have, every rank adds all blocks, in the order of the ranks, as
 * `elephant.collective.shared_memory` does: the results have the same bits everywhere. Two turns of blocks are used
 * by turns. A rank writes over the block of step k-2 when all have published step k-1, and so have read step k-2.
 *
 * A rank that waits looks for the others' numbers for some 50 microseconds, and sleeps then. Every 20 ms it looks
 * whether the failure detector has something to read. What that is, and what to do without shared memory, Python is
 * asked (elephant/backends/tensorflow_exchange.py).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define EXPORTED __attribute__((visibility("default")))
#define NAME "ElephantExchange"
/* Between the head of a block and its values: a cache line. */
#define HEAD_BYTES 64
#define CHUNK 4096
#define SPINS 1000
#define SLICE_NS 20000000
#define LOOK_S 1.0

enum { TF_FLOAT = 1, TF_OK = 0, TF_ABORTED = 10 };

typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;

#define FUNCTIONS(F)                                                                                                   \
  F(TF_Status *, TF_NewStatus, (void))                                                                                 \
  F(void, TF_DeleteStatus, (TF_Status *))                                                                              \
  F(void, TF_SetStatus, (TF_Status *, int, const char *))                                                              \
  F(int, TF_GetCode, (const TF_Status *))                                                                              \
  F(TF_OpDefinitionBuilder *, TF_NewOpDefinitionBuilder, (const char *))                                               \
  F(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder *, const char *))                                     \
  F(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder *, const char *))                                    \
  F(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder *, const char *))                                   \
  F(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder *, bool))                                       \
  F(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder *, TF_Status *))                                            \
  F(TF_KernelBuilder *, TF_NewKernelBuilder,                                                                           \
    (const char *, const char *, void *(*)(TF_OpKernelConstruction *), void (*)(void *, TF_OpKernelContext *),         \
     void (*)(void *)))                                                                                                \
  F(void, TF_RegisterKernelBuilder, (const char *, TF_KernelBuilder *, TF_Status *))                                   \
  F(void, TF_OpKernelConstruction_GetAttrInt64, (TF_OpKernelConstruction *, const char *, int64_t *, TF_Status *))     \
  F(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction *, TF_Status *))                                   \
  F(void, TF_OpKernelContext_Failure, (TF_OpKernelContext *, TF_Status *))                                             \
  F(int, TF_NumInputs, (TF_OpKernelContext *))                                                                         \
  F(void, TF_GetInput, (TF_OpKernelContext *, int, TF_Tensor **, TF_Status *))                                         \
  F(TF_Tensor *, TF_ForwardInputOrAllocateOutput,                                                                      \
    (TF_OpKernelContext *, const int *, int, int, const int64_t *, int, int *, TF_Status *))                           \
  F(void, TF_DeleteTensor, (TF_Tensor *))                                                                              \
  F(int, TF_NumDims, (const TF_Tensor *))                                                                              \
  F(int64_t, TF_Dim, (const TF_Tensor *, int))                                                                         \
  F(int64_t, TF_TensorElementCount, (const TF_Tensor *))                                                               \
  F(void *, TF_TensorData, (const TF_Tensor *))

#define DECLARED(result, name, arguments) static result(*name) arguments;
FUNCTIONS(DECLARED)

/* What Python is asked for, and what it may answer. */
enum { JOIN, NEWS, LATE };
enum { DONE, ATTACHED, FAILED };
#define MOST_DIMS 16

typedef int32_t Ask(int32_t what, double waited_s, int32_t count, const int64_t *sizes, float *const *gradients,
                    float *const *averages);

/* What ranks share, as Python fills it in. */
typedef struct {
  char *memory;
  int64_t block_bytes;
  const double *weight;
  int32_t *stop; /* whether this rank asks all to stop; whether any has asked */
  double *waited_s;
  double timeout_s;
  int32_t rank, size, watch;
} Shared;

typedef struct Exchange {
  struct Exchange *next;
  int64_t number;
  Ask *ask;
  Shared shared;
  bool is_attached;
  atomic_bool is_closed;
  int users;
  uint32_t step;
} Exchange;

typedef struct {
  _Atomic uint32_t step;
  int32_t stop;
} Head;

/* To be raised with every change of what Python and this file share. */
EXPORTED const int32_t elephant_exchange_version = 1;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;
static Exchange *exchanges;
static int64_t last_number;

/* Exchanges by number: a step that is run after its fit has ended finds none. */

static Exchange *found(int64_t number) {
  Exchange *one = exchanges;
  while (one && one->number != number) one = one->next;
  return one;
}

static Exchange *entered(int64_t number) {
  pthread_mutex_lock(&lock);
  Exchange *one = found(number);
  if (one && one->is_closed) one = NULL;
  if (one) one->users++;
  pthread_mutex_unlock(&lock);
  return one;
}

static void leave(Exchange *one) {
  pthread_mutex_lock(&lock);
  one->users--;
  pthread_cond_broadcast(&left);
  pthread_mutex_unlock(&lock);
}

EXPORTED int64_t elephant_exchange_open(Ask *ask) {
  Exchange *one = calloc(1, sizeof *one);
  if (!one) return 0;
  pthread_mutex_lock(&lock);
  *one = (Exchange){.next = exchanges, .number = ++last_number, .ask = ask};
  exchanges = one;
  pthread_mutex_unlock(&lock);
  return one->number;
}

/* Called while Python is asked to JOIN. */
EXPORTED void elephant_exchange_attach(int64_t number, const Shared *shared) {
  pthread_mutex_lock(&lock);
  Exchange *one = found(number);
  if (one) {
    one->shared = *shared;
    one->is_attached = true;
  }
  pthread_mutex_unlock(&lock);
}

/* Returns when no step uses the memory any more, which takes two slices at most. */
EXPORTED void elephant_exchange_close(int64_t number) {
  pthread_mutex_lock(&lock);
  Exchange *one = found(number);
  if (one) {
    one->is_closed = true;
    while (one->users) pthread_cond_wait(&left, &lock);
    Exchange **link = &exchanges;
    while (*link != one) link = &(*link)->next;
    *link = one->next;
    free(one);
  }
  pthread_mutex_unlock(&lock);
}

/* Threads of TensorFlow flush denormal numbers to zero; whoever calls, the bits are to be theirs. */

#if defined(__SSE2__)
static uint64_t flush_denormals(void) {
  unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  return before;
}
static void restore(uint64_t before) { _mm_setcsr((unsigned)before); }
#elif defined(__aarch64__)
static uint64_t flush_denormals(void) {
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(before | (1 << 24)) : "memory");
  return before;
}
static void restore(uint64_t before) { __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory"); }
#else
static uint64_t flush_denormals(void) { return 0; }
static void restore(uint64_t before) { (void)before; }
#endif

__attribute__((noinline)) static void write_weighted(const float *restrict values, int64_t size, double weight,
                                                     float *restrict block) {
  const float factor = (float)weight;
  /* A rank without rows brings zeros, whatever its stand-in rows gave. */
  if (weight == 0.0)
    for (int64_t i = 0; i < size; i++) block[i] = 0;
  else
    for (int64_t i = 0; i < size; i++) block[i] = values[i] * factor;
}

__attribute__((noinline)) static void add(const float *left, const float *restrict right, int64_t size, float *sum) {
#pragma GCC ivdep /* The left one may be the sum itself. */
  for (int64_t i = 0; i < size; i++) sum[i] = left[i] + right[i];
}

static Head *head_of(const Shared *shared, uint32_t step, int rank) {
  return (Head *)(shared->memory + ((step & 1) * shared->size + rank) * shared->block_bytes);
}

static float *values_of(Head *head) { return (float *)((char *)head + HEAD_BYTES); }

static void add_all(const Shared *shared, uint32_t step, int64_t start, int64_t size, float *sum) {
  for (int64_t done = 0; done < size; done += CHUNK) {
    const int64_t count = size - done < CHUNK ? size - done : CHUNK, from = start + done;
    const float *first = values_of(head_of(shared, step, 0)) + from;
    for (int rank = 1; rank < shared->size; rank++, first = sum + done)
      add(first, values_of(head_of(shared, step, rank)) + from, count, sum + done);
  }
}

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static void pause_briefly(void) {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Returns whether the rank's number has come; if not, Python knows why. */
static bool has_come(Exchange *one, _Atomic uint32_t *number, double began_s, double *looked_s) {
  for (int spin = 0; spin < SPINS; spin++, pause_briefly())
    if (atomic_load_explicit(number, memory_order_acquire) == one->step) return true;
  for (;;) {
    const uint32_t seen = atomic_load_explicit(number, memory_order_acquire);
    if (seen == one->step) return true;
    const struct timespec slice = {.tv_nsec = SLICE_NS};
    syscall(SYS_futex, number, FUTEX_WAIT, seen, &slice, NULL, 0);
    if (atomic_load_explicit(number, memory_order_acquire) == one->step) return true;
    if (one->is_closed) return false;
    const double now = now_s();
    struct pollfd watch = {.fd = one->shared.watch, .events = POLLIN};
    if (now - began_s >= one->shared.timeout_s) {
      one->ask(LATE, now - began_s, 0, NULL, NULL, NULL);
      return false;
    }
    if (poll(&watch, 1, 0) > 0 || now - *looked_s >= LOOK_S) {
      *looked_s = now;
      if (one->ask(NEWS, now - began_s, 0, NULL, NULL, NULL) == FAILED) return false;
    }
  }
}

static bool all_have_come(Exchange *one) {
  const Shared *shared = &one->shared;
  const double began_s = now_s();
  double looked_s = began_s;
  for (int rank = 0; rank < shared->size; rank++) {
    Head *head = head_of(shared, one->step, rank);
    if (!has_come(one, &head->step, began_s, &looked_s)) return false;
    if (head->stop) shared->stop[1] = 1;
  }
  *shared->waited_s += now_s() - began_s;
  return true;
}

static void publish(const Shared *shared, uint32_t step) {
  Head *own = head_of(shared, step, shared->rank);
  own->stop = shared->stop[0];
  atomic_store_explicit(&own->step, step, memory_order_release);
  syscall(SYS_futex, &own->step, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* One call of the kernel: its tensors. */
typedef struct {
  TF_OpKernelContext *context;
  TF_Status *status;
  int count;
  TF_Tensor **inputs, **outputs;
  int64_t *sizes;
  float **gradients, **averages;
} Call;

static bool take_inputs(Call *call) {
  for (int i = 0; i < call->count; i++) {
    TF_GetInput(call->context, i, &call->inputs[i], call->status);
    if (TF_GetCode(call->status) != TF_OK) return false;
    call->sizes[i] = TF_TensorElementCount(call->inputs[i]);
    call->gradients[i] = TF_TensorData(call->inputs[i]);
  }
  return true;
}

/* Takes the inputs' memory for the outputs, unless somebody still needs them. */
static bool take_outputs(Call *call, bool inputs_are_done) {
  for (int i = 0; i < call->count; i++) {
    int64_t dims[MOST_DIMS];
    const int rank = TF_NumDims(call->inputs[i]);
    if (rank > MOST_DIMS) return false;
    for (int axis = 0; axis < rank; axis++) dims[axis] = TF_Dim(call->inputs[i], axis);
    if (inputs_are_done) {
      TF_DeleteTensor(call->inputs[i]);
      call->inputs[i] = NULL;
    }
    call->outputs[i] =
        TF_ForwardInputOrAllocateOutput(call->context, &i, inputs_are_done, i, dims, rank, NULL, call->status);
    if (TF_GetCode(call->status) != TF_OK) return false;
    call->averages[i] = TF_TensorData(call->outputs[i]);
  }
  return true;
}

static bool average(Exchange *one, Call *call) {
  if (!take_inputs(call)) return false;
  if (!one->is_attached) {
    if (!take_outputs(call, false)) return false;
    const int answer = one->ask(JOIN, 0, call->count, call->sizes, call->gradients, call->averages);
    if (answer != ATTACHED) return answer == DONE;
  }
  const Shared *shared = &one->shared;
  float *block = values_of(head_of(shared, ++one->step, shared->rank));
  for (int i = 0; i < call->count; block += call->sizes[i++])
    write_weighted(call->gradients[i], call->sizes[i], *shared->weight, block);
  publish(shared, one->step);
  if (!all_have_come(one)) return false;
  if (!call->outputs[0] && !take_outputs(call, true)) return false;
  int64_t start = 0;
  for (int i = 0; i < call->count; start += call->sizes[i++])
    add_all(shared, one->step, start, call->sizes[i], call->averages[i]);
  return true;
}

static void compute(void *kernel, TF_OpKernelContext *context) {
  const int count = TF_NumInputs(context);
  TF_Tensor *tensors[2 * count];
  float *values[2 * count];
  int64_t sizes[count];
  memset(tensors, 0, sizeof tensors);
  Call call = {context, TF_NewStatus(), count, tensors, tensors + count, sizes, values, values + count};
  Exchange *one = entered(*(int64_t *)kernel);
  bool is_done = false;
  if (one) {
    const uint64_t before = flush_denormals();
    is_done = average(one, &call);
    restore(before);
    leave(one);
  }
  for (int i = 0; i < call.count; i++) {
    if (call.inputs[i]) TF_DeleteTensor(call.inputs[i]);
    if (call.outputs[i]) TF_DeleteTensor(call.outputs[i]);
  }
  if (!is_done && TF_GetCode(call.status) == TF_OK) {
    const char *why = one ? "The exchange of gradients between ranks failed." : "The fit of this step has ended.";
    TF_SetStatus(call.status, TF_ABORTED, why);
  }
  if (!is_done) TF_OpKernelContext_Failure(context, call.status);
  TF_DeleteStatus(call.status);
}

static void *new_kernel(TF_OpKernelConstruction *construction) {
  int64_t *number = calloc(1, sizeof *number);
  TF_Status *status = TF_NewStatus();
  TF_OpKernelConstruction_GetAttrInt64(construction, "exchange", number, status);
  if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(construction, status);
  TF_DeleteStatus(status);
  return number;
}

/* Runs when the library is loaded. Without the op, whoever has loaded it knows that it does not fit. */
__attribute__((constructor)) static void register_kernel(void) {
  void *framework = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_LAZY);
  if (!framework) return;
#define LOOKED_UP(result, name, arguments) \
  if (!(name = (result(*) arguments)dlsym(framework, #name))) return;
  FUNCTIONS(LOOKED_UP)
  TF_Status *status = TF_NewStatus();
  TF_KernelBuilder *kernel = TF_NewKernelBuilder(NAME, "CPU", new_kernel, compute, free);
  TF_RegisterKernelBuilder(NAME, kernel, status);
  if (TF_GetCode(status) == TF_OK) {
    TF_OpDefinitionBuilder *op = TF_NewOpDefinitionBuilder(NAME);
    TF_OpDefinitionBuilderAddAttr(op, "N: int >= 1");
    TF_OpDefinitionBuilderAddAttr(op, "exchange: int");
    TF_OpDefinitionBuilderAddInput(op, "gradients: N * float");
    TF_OpDefinitionBuilderAddOutput(op, "averages: N * float");
    TF_OpDefinitionBuilderSetIsStateful(op, true);
    TF_RegisterOpDefinition(op, status);
  }
  TF_DeleteStatus(status);
}
