/* Average of gradients over the ranks of one host: a kernel of TensorFlow.
 *
 * It knows TensorFlow by its C API alone, and looks the functions up in the library that the process has loaded. So it
 * is built without TensorFlow, and one binary serves all versions.
 *
 * A step has rounds. In each, every rank writes a part of its gradients, times its weight, into its own block of the
 * memory that all share, and publishes the round's number. When all have, every rank adds all blocks, in the order of
 * the ranks, as `elephant.collective.shared_memory` does: the results have the same bits everywhere. Two turns of
 * blocks are used by turns. A rank writes over the block of round k-2 when all have published round k-1, and so have
 * read round k-2. A block is short enough to stay in the processor's cache.
 *
 * Slices, the gradients of looked-up rows, follow the dense gradients in rounds of their own, indices and weighted
 * values, and every rank puts those of all ranks behind each other. How many each rank has, the first round tells.
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

enum { TF_FLOAT = 1, TF_INT64 = 9, TF_OK = 0, TF_ABORTED = 10 };

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
  F(TF_Tensor *, TF_AllocateOutput,                                                                                    \
    (TF_OpKernelContext *, int, int, const int64_t *, int, size_t, TF_Status *))                                       \
  F(int, TF_TensorType, (const TF_Tensor *))                                                                           \
  F(void, TF_DeleteTensor, (TF_Tensor *))                                                                              \
  F(int, TF_NumDims, (const TF_Tensor *))                                                                              \
  F(int64_t, TF_Dim, (const TF_Tensor *, int))                                                                         \
  F(int64_t, TF_TensorElementCount, (const TF_Tensor *))                                                               \
  F(void *, TF_TensorData, (const TF_Tensor *))

#define DECLARED(result, name, arguments) static result(*name) arguments;
FUNCTIONS(DECLARED)

/* What Python is asked for, and what it may answer. */
enum { JOIN, NEWS, LATE, TAKE };
enum { DONE, ATTACHED, FAILED };
#define MOST_DIMS 16

/* Dense gradients and their averages; slices, and those of all ranks. */
typedef struct {
  int32_t dense, sparse;   /* how many gradients */
  int64_t *sizes;          /* numbers of each dense gradient */
  float **gradients, **averages;
  int64_t *rows, *widths;  /* slices of each sparse gradient, and numbers of a slice */
  char **indices;
  float **values;
  int64_t *all_rows;       /* slices of all ranks */
  char **all_indices;
  float **all_values;
  int32_t index_bytes;
} Gradients;

typedef int32_t Ask(int32_t what, double waited_s, const Gradients *gradients);

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
} Head; /* Of a block. The numbers of slices come behind it, where there are any, and then the values. */

/* To be raised with every change of what Python and this file share. */
EXPORTED const int32_t elephant_exchange_version = 2;

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

static int64_t *rows_of(Head *head) { return (int64_t *)((char *)head + HEAD_BYTES); }

static int64_t head_bytes(int sparse) { return HEAD_BYTES + (8 * sparse + 63) / 64 * 64; }

static char *values_of(const Shared *shared, uint32_t step, int rank, int sparse) {
  return (char *)head_of(shared, step, rank) + head_bytes(sparse);
}

static void add_all(const Shared *shared, uint32_t step, int sparse, int64_t start, int64_t size, float *sum) {
  for (int64_t done = 0; done < size; done += CHUNK) {
    const int64_t count = size - done < CHUNK ? size - done : CHUNK, from = start + done;
    const float *first = (float *)values_of(shared, step, 0, sparse) + from;
    for (int rank = 1; rank < shared->size; rank++, first = sum + done)
      add(first, (float *)values_of(shared, step, rank, sparse) + from, count, sum + done);
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
      one->ask(LATE, now - began_s, NULL);
      return false;
    }
    if (poll(&watch, 1, 0) > 0 || now - *looked_s >= LOOK_S) {
      *looked_s = now;
      if (one->ask(NEWS, now - began_s, NULL) == FAILED) return false;
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

/* Ends a round: returns whether all ranks have published it. */
static bool all_have_published(Exchange *one) {
  publish(&one->shared, one->step);
  return all_have_come(one);
}

/* One call of the kernel: its tensors, dense gradients first, then indices, then values. */
typedef struct {
  TF_OpKernelContext *context;
  TF_Status *status;
  int count;
  TF_Tensor **inputs, **outputs;
  Gradients *gradients;
} Call;

static bool is_ok(Call *call) { return TF_GetCode(call->status) == TF_OK; }

/* Returns whether the tensor has few dimensions, which it writes down. */
static bool take_dims(const TF_Tensor *tensor, int64_t *dims, int *count) {
  *count = TF_NumDims(tensor);
  if (*count > MOST_DIMS) return false;
  for (int axis = 0; axis < *count; axis++) dims[axis] = TF_Dim(tensor, axis);
  return true;
}

static bool take_inputs(Call *call) {
  Gradients *all = call->gradients;
  for (int i = 0; i < call->count; i++) {
    TF_GetInput(call->context, i, &call->inputs[i], call->status);
    if (!is_ok(call)) return false;
  }
  for (int i = 0; i < all->dense; i++) {
    all->sizes[i] = TF_TensorElementCount(call->inputs[i]);
    all->gradients[i] = TF_TensorData(call->inputs[i]);
  }
  for (int i = 0; i < all->sparse; i++) {
    const TF_Tensor *indices = call->inputs[all->dense + i], *values = call->inputs[all->dense + all->sparse + i];
    int64_t dims[MOST_DIMS];
    int count;
    if (!take_dims(values, dims, &count) || count < 1) return false;
    if (TF_NumDims(indices) != 1 || TF_Dim(indices, 0) != dims[0]) return false;
    all->rows[i] = dims[0];
    all->widths[i] = 1;
    for (int axis = 1; axis < count; axis++) all->widths[i] *= dims[axis];
    all->indices[i] = TF_TensorData(indices);
    all->values[i] = TF_TensorData(values);
    all->index_bytes = TF_TensorType(indices) == TF_INT64 ? 8 : 4;
  }
  return true;
}

/* Takes the memory of dense gradients for their averages, unless somebody else still needs it. The gradients stay
 * where they are until an average is written over them. */
static bool take_averages(Call *call) {
  for (int i = 0; i < call->gradients->dense; i++) {
    int64_t dims[MOST_DIMS];
    int count;
    if (!take_dims(call->inputs[i], dims, &count)) return false;
    TF_DeleteTensor(call->inputs[i]);
    call->inputs[i] = NULL;
    call->outputs[i] = TF_ForwardInputOrAllocateOutput(call->context, &i, 1, i, dims, count, NULL, call->status);
    if (!is_ok(call)) return false;
    call->gradients->averages[i] = TF_TensorData(call->outputs[i]);
  }
  return true;
}

static char *new_output(Call *call, int place, int64_t rows) {
  TF_Tensor *input = call->inputs[place];
  int64_t dims[MOST_DIMS], elements = 1;
  int count;
  if (!take_dims(input, dims, &count)) return NULL;
  dims[0] = rows;
  for (int axis = 0; axis < count; axis++) elements *= dims[axis];
  const int type = TF_TensorType(input);
  const size_t bytes = elements * (type == TF_INT64 ? 8 : 4);
  call->outputs[place] = TF_AllocateOutput(call->context, place, type, dims, count, bytes, call->status);
  return is_ok(call) ? TF_TensorData(call->outputs[place]) : NULL;
}

/* Makes room for the slices of all ranks. */
static bool take_all_slices(Call *call) {
  Gradients *all = call->gradients;
  for (int i = 0; i < all->sparse; i++) {
    all->all_indices[i] = new_output(call, all->dense + i, all->all_rows[i]);
    if (is_ok(call)) all->all_values[i] = (float *)new_output(call, all->dense + all->sparse + i, all->all_rows[i]);
    if (!is_ok(call)) return false;
  }
  return true;
}

static int64_t smaller(int64_t left, int64_t right) { return left < right ? left : right; }
static int64_t larger(int64_t left, int64_t right) { return left > right ? left : right; }

/* Rounds of dense gradients, at least one; the first one tells how many slices this rank has. */
static bool average_dense(Exchange *one, const Gradients *all, int64_t *rows_of_ranks) {
  const Shared *shared = &one->shared;
  const int64_t room = (shared->block_bytes - head_bytes(all->sparse)) / sizeof(float);
  int64_t total = 0, start = 0;
  for (int i = 0; i < all->dense; i++) total += all->sizes[i];
  do {
    const int64_t end = smaller(start + room, total);
    Head *head = head_of(shared, ++one->step, shared->rank);
    float *block = (float *)values_of(shared, one->step, shared->rank, all->sparse);
    memcpy(rows_of(head), all->rows, 8 * all->sparse);
    for (int64_t i = 0, first = 0; i < all->dense; first += all->sizes[i++]) {
      const int64_t from = larger(start, first), to = smaller(end, first + all->sizes[i]);
      if (from < to) write_weighted(all->gradients[i] + from - first, to - from, *shared->weight, block + from - start);
    }
    if (!all_have_published(one)) return false;
    for (int64_t i = 0, first = 0; i < all->dense; first += all->sizes[i++]) {
      const int64_t from = larger(start, first), to = smaller(end, first + all->sizes[i]);
      if (from < to)
        add_all(shared, one->step, all->sparse, from - start, to - from, all->averages[i] + from - first);
    }
    for (int rank = 0; rank < shared->size; rank++)
      memcpy(rows_of_ranks + rank * all->sparse, rows_of(head_of(shared, one->step, rank)), 8 * all->sparse);
    start = end;
  } while (start < total);
  return true;
}

/* What a rank sends of its slices: indices and values of one gradient after the other, as one row of bytes. */
typedef struct {
  int64_t first, bytes;
} Span;

static Span next_span(Span last, int64_t bytes) { return (Span){last.first + last.bytes, bytes}; }

/* The part of a span that a round has, from `start` on. */
static Span within(Span span, int64_t start, int64_t room) {
  const int64_t from = larger(span.first, start), to = smaller(span.first + span.bytes, start + room);
  return (Span){from, larger(to - from, 0)};
}

static void write_slices(const Gradients *all, int64_t start, int64_t room, double weight, char *block) {
  Span span = {0, 0};
  for (int i = 0; i < all->sparse; i++) {
    Span part = within(span = next_span(span, all->rows[i] * all->index_bytes), start, room);
    if (part.bytes) memcpy(block + part.first - start, all->indices[i] + part.first - span.first, part.bytes);
    part = within(span = next_span(span, all->rows[i] * all->widths[i] * 4), start, room);
    if (part.bytes)
      write_weighted(all->values[i] + (part.first - span.first) / 4, part.bytes / 4, weight,
                     (float *)(block + part.first - start));
  }
}

/* Puts a rank's part behind those of the ranks before it, which have `before` slices of each gradient. */
static void read_slices(const Gradients *all, const int64_t *rows, const int64_t *before, int64_t start, int64_t room,
                        const char *block) {
  Span span = {0, 0};
  for (int i = 0; i < all->sparse; i++) {
    Span part = within(span = next_span(span, rows[i] * all->index_bytes), start, room);
    char *target = all->all_indices[i] + before[i] * all->index_bytes;
    if (part.bytes) memcpy(target + part.first - span.first, block + part.first - start, part.bytes);
    part = within(span = next_span(span, rows[i] * all->widths[i] * 4), start, room);
    target = (char *)(all->all_values[i] + before[i] * all->widths[i]);
    if (part.bytes) memcpy(target + part.first - span.first, block + part.first - start, part.bytes);
  }
}

static bool gather_slices(Exchange *one, const Gradients *all, const int64_t *rows_of_ranks) {
  const Shared *shared = &one->shared;
  const int64_t room = shared->block_bytes - head_bytes(all->sparse);
  int64_t longest = 0;
  for (int rank = 0; rank < shared->size; rank++) {
    int64_t bytes = 0;
    for (int i = 0; i < all->sparse; i++)
      bytes += rows_of_ranks[rank * all->sparse + i] * (all->index_bytes + 4 * all->widths[i]);
    longest = larger(longest, bytes);
  }
  for (int64_t start = 0; start < longest; start += room) {
    one->step++;
    write_slices(all, start, room, *shared->weight, values_of(shared, one->step, shared->rank, all->sparse));
    if (!all_have_published(one)) return false;
    int64_t before[all->sparse];
    memset(before, 0, sizeof before);
    for (int rank = 0; rank < shared->size; rank++) {
      const int64_t *rows = rows_of_ranks + rank * all->sparse;
      read_slices(all, rows, before, start, room, values_of(shared, one->step, rank, all->sparse));
      for (int i = 0; i < all->sparse; i++) before[i] += rows[i];
    }
  }
  return true;
}

/* Takes the slices that Python has gathered, where ranks do not share memory. */
static bool take_gathered(Exchange *one, Call *call) {
  if (!call->gradients->sparse) return true;
  return take_all_slices(call) && one->ask(TAKE, 0, call->gradients) == DONE;
}

static bool average(Exchange *one, Call *call) {
  Gradients *all = call->gradients;
  if (!take_inputs(call) || !take_averages(call)) return false;
  if (!one->is_attached) {
    const int answer = one->ask(JOIN, 0, all);
    if (answer != ATTACHED) return answer == DONE && take_gathered(one, call);
  }
  const Shared *shared = &one->shared;
  /* A rank without rows brings no slices, whatever its stand-in rows looked up. */
  if (*shared->weight == 0.0) memset(all->rows, 0, 8 * all->sparse);
  int64_t rows_of_ranks[shared->size * all->sparse + 1];
  if (!average_dense(one, all, rows_of_ranks)) return false;
  if (!all->sparse) return true;
  for (int i = 0; i < all->sparse; i++) {
    all->all_rows[i] = 0;
    for (int rank = 0; rank < shared->size; rank++) all->all_rows[i] += rows_of_ranks[rank * all->sparse + i];
  }
  return take_all_slices(call) && gather_slices(one, all, rows_of_ranks);
}

typedef struct {
  int64_t exchange, dense, sparse;
} Kernel;

static void compute(void *given, TF_OpKernelContext *context) {
  const Kernel *kernel = given;
  const int dense = kernel->dense, sparse = kernel->sparse, count = dense + 2 * sparse;
  TF_Tensor *tensors[2 * count];
  memset(tensors, 0, sizeof tensors);
  int64_t numbers[dense + 3 * sparse + 1];
  float *floats[2 * dense + 2 * sparse + 1];
  char *indices[2 * sparse + 1];
  Gradients gradients = {
      .dense = dense,
      .sparse = sparse,
      .sizes = numbers,
      .gradients = floats,
      .averages = floats + dense,
      .rows = numbers + dense,
      .widths = numbers + dense + sparse,
      .indices = indices,
      .values = floats + 2 * dense,
      .all_rows = numbers + dense + 2 * sparse,
      .all_indices = indices + sparse,
      .all_values = floats + 2 * dense + sparse,
  };
  Call call = {context, TF_NewStatus(), count, tensors, tensors + count, &gradients};
  Exchange *one = entered(kernel->exchange);
  bool is_done = false;
  if (one) {
    const uint64_t before = flush_denormals();
    is_done = average(one, &call);
    restore(before);
    leave(one);
  }
  for (int i = 0; i < 2 * count; i++)
    if (tensors[i]) TF_DeleteTensor(tensors[i]);
  if (!is_done && TF_GetCode(call.status) == TF_OK) {
    const char *why = one ? "The exchange of gradients between ranks failed." : "The fit of this step has ended.";
    TF_SetStatus(call.status, TF_ABORTED, why);
  }
  if (!is_done) TF_OpKernelContext_Failure(context, call.status);
  TF_DeleteStatus(call.status);
}

static void *new_kernel(TF_OpKernelConstruction *construction) {
  Kernel *kernel = calloc(1, sizeof *kernel);
  TF_Status *status = TF_NewStatus();
  const char *names[] = {"exchange", "N", "M"};
  int64_t *values[] = {&kernel->exchange, &kernel->dense, &kernel->sparse};
  for (int i = 0; i < 3; i++) {
    TF_OpKernelConstruction_GetAttrInt64(construction, names[i], values[i], status);
    if (TF_GetCode(status) != TF_OK) TF_OpKernelConstruction_Failure(construction, status);
  }
  TF_DeleteStatus(status);
  return kernel;
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
    const char *attributes[] = {"N: int >= 0", "M: int >= 0", "T: {int32, int64} = DT_INT32", "exchange: int"};
    for (int i = 0; i < 4; i++) TF_OpDefinitionBuilderAddAttr(op, attributes[i]);
    const char *inputs[] = {"gradients: N * float", "indices: M * T", "values: M * float"};
    for (int i = 0; i < 3; i++) TF_OpDefinitionBuilderAddInput(op, inputs[i]);
    const char *outputs[] = {"averages: N * float", "all_indices: M * T", "all_values: M * float"};
    for (int i = 0; i < 3; i++) TF_OpDefinitionBuilderAddOutput(op, outputs[i]);
    TF_OpDefinitionBuilderSetIsStateful(op, true);
    TF_RegisterOpDefinition(op, status);
  }
  TF_DeleteStatus(status);
}
