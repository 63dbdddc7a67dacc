/* The exported functions: choose the instruction set, cut the work into ranges of blocks or boxes, one thread per range.
 *
 * Each call starts and joins its threads. Nothing outlives the call, so it is safe from several threads at once and in
 * a process forked from one that has called it.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "thinwire.h"

enum { MAX_THREADS = 64 };

extern const tw_kernels tw_baseline;
#if defined(__x86_64__)
#include <cpuid.h>
extern const tw_kernels tw_avx2;

/* Whether the processor has AVX2, FMA and BMI, and the system saves their registers. __builtin_cpu_supports needs tables
 * from libgcc, which not every compiler links. */
static int find_avx2(void) {
  unsigned a, b, c, d, kept, high;
  unsigned first = bit_OSXSAVE | bit_FMA | bit_POPCNT, newer = bit_AVX2 | bit_BMI | bit_BMI2;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & first) != first) return 0;
  __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  return (kept & 6) == 6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & newer) == newer;
}

/* Found only once: in a virtual machine every CPUID exits to the host, which takes more than a microsecond. */
static int has_avx2(void) {
  static _Atomic int known = -1;
  if (known < 0) known = find_avx2();
  return known;
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
extern const tw_kernels tw_dotprod;
#endif

/* For tests, THINWIRE_ISA=baseline selects the kernels for processors without the newer instructions. */
static const tw_kernels *kernels(void) {
  const char *asked = getenv("THINWIRE_ISA");
  if (asked && !strcmp(asked, "baseline")) return &tw_baseline;
#if defined(__x86_64__)
  if (has_avx2()) return &tw_avx2; /* whatever has it has F16C */
#elif defined(__aarch64__) && defined(__linux__)
  if (getauxval(AT_HWCAP) & 1 << 20) return &tw_dotprod; /* HWCAP_ASIMDDP */
#endif
  return &tw_baseline;
}

typedef struct {
  const tw_task *task;
  tw_range run;
  int64_t first, last;
} part;

static void *run_part(void *argument) {
  part *p = argument;
  p->run(p->task, p->first, p->last);
  return NULL;
}

static int usable(int threads) { return threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads; }

static void run_units(const tw_task *task, tw_range run, int64_t units, int threads) {
  threads = usable(threads);
  part parts[MAX_THREADS];
  pthread_t started[MAX_THREADS];
  int running[MAX_THREADS] = {0};
  for (int i = 0; i < threads; i++) parts[i] = (part){task, run, units * i / threads, units * (i + 1) / threads};
  for (int i = 1; i < threads; i++) running[i] = pthread_create(&started[i], NULL, run_part, &parts[i]) == 0;
  for (int i = 0; i < threads; i++)
    if (!running[i]) run_part(&parts[i]); /* the first, and any that could not be started */
  for (int i = 1; i < threads; i++)
    if (running[i]) pthread_join(started[i], NULL);
}

static void run_all(const tw_task *task, tw_range run) {
  const tw_job *job = task->job;
  run_units(task, run, job->block ? job->num_blocks : job->numel, job->threads);
}

static void run_boxes(const tw_task *task) {
  const tw_fake *fake = task->fake;
  run_units(task, kernels()->fake, fake->cuts_o * fake->cuts_c * fake->cuts_i, fake->threads);
}

/* Write the header, and zeros in the gaps between sections. */
static void frame(const tw_job *job, uint8_t *wire) {
  int64_t scales_end = job->scales_at + 2 * job->num_blocks, codes_at = job->plane_at[0];
  int64_t last_plane = job->num_planes - 1, width = job->plane_width[last_plane];
  int64_t codes = job->num_blocks ? (job->num_blocks - 1) * job->block + job->tail : job->numel;
  int64_t codes_end = job->plane_at[last_plane] + codes * width / 8;
  memcpy(wire, job->header, sizeof job->header);
  if (codes_at > job->minima_at) {
    int64_t minima_end = job->minima_at + 2 * job->num_blocks;
    memset(wire + minima_end, 0, (size_t)(codes_at - minima_end));
  }
  memset(wire + scales_end, 0, (size_t)(job->minima_at - scales_end));
  memset(wire + codes_end, 0, (size_t)(job->nbytes - codes_end));
}

TW_EXPORT int tw_abi(void) { return TW_ABI; }
TW_EXPORT const char *tw_variant(void) { return kernels()->name; }

/* wire = encode(x + residual), and the residual that is left, or without x wire = encode(the sum of wires). */
TW_EXPORT void tw_encode(const tw_job *job, const void *x, float *residual, const uint8_t *wires, uint8_t *wire) {
  frame(job, wire);
  tw_task task = {.job = job, .x = x, .residual = residual, .wires = x ? wire : wires, .wire = wire};
  run_all(&task, x ? kernels()->encode : kernels()->recode);
}

TW_EXPORT void tw_decode_sum(const tw_job *job, const uint8_t *wires, void *out) {
  tw_task task = {.job = job, .wires = wires, .out = out};
  run_all(&task, kernels()->decode_sum);
}

/* Returns whether a scale is invalid. */
TW_EXPORT int tw_fake_quantize(const tw_fake *fake, const void *x, const float *scale, const float *shift, void *y) {
  int32_t bad_scale = 0;
  tw_task task = {.fake = fake, .x = x, .scale = scale, .shift = shift, .out = y, .bad_scale = &bad_scale};
  run_boxes(&task);
  return bad_scale;
}

TW_EXPORT void tw_fake_quantize_grad(const tw_fake *fake, const void *x, const void *grad, const float *scale,
                                     const float *shift, void *dx, float *sums, double *partials, double factor) {
  int32_t bad_scale = 0;
  tw_task task = {.fake = fake, .x = x, .grad = grad, .scale = scale, .shift = shift, .out = dx, .sums = sums,
                  .partials = partials, .factor = factor, .bad_scale = &bad_scale};
  run_boxes(&task);
  if (partials) kernels()->finish_fake(&task, fake->cuts_o * fake->cuts_i);
}

static int64_t exact_blocks(const tw_exact *exact) { return (exact->numel + TW_EXACT_BLOCK - 1) / TW_EXACT_BLOCK; }

/* Writes all blocks one after the other to `room`, which is as long as the numbers; returns how many bytes they take. */
TW_EXPORT int64_t tw_exact_encode(const tw_exact *exact, const void *fresh, const void *base, uint8_t *room,
                                  uint16_t *lengths) {
  tw_task task = {.exact = exact, .x = fresh, .base = base, .wire = room, .lengths = lengths};
  int64_t blocks = exact_blocks(exact), threads = usable(exact->threads), end = 0;
  run_units(&task, kernels()->exact_encode, blocks, exact->threads);
  for (int64_t i = 0; i < threads; i++) {
    int64_t first = blocks * i / threads, bytes = 0;
    for (int64_t k = first; k < blocks * (i + 1) / threads; k++) bytes += lengths[k];
    if (bytes) memmove(room + end, room + first * TW_EXACT_BLOCK * (exact->bits / 8), (size_t)bytes);
    end += bytes;
  }
  return end;
}

/* Returns whether the bytes are damaged. */
TW_EXPORT int tw_exact_decode(const tw_exact *exact, const uint8_t *bytes, const int64_t *starts, const void *base,
                              void *out) {
  int32_t damaged = 0;
  tw_task task = {.exact = exact, .wires = bytes, .starts = starts, .base = base, .out = out, .bad_scale = &damaged};
  run_units(&task, kernels()->exact_decode, exact_blocks(exact), exact->threads);
  return damaged;
}

TW_EXPORT void tw_exact_count(const tw_exact *exact, const void *fresh, const void *base, int64_t stride, int64_t *counts) {
  tw_task task = {.exact = exact, .x = fresh, .base = base, .stride = stride, .counts = counts};
  kernels()->exact_count(&task, 0, exact_blocks(exact));
}
