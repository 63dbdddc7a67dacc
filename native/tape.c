/* Kernels and messages for a GPU's stream, started one after the other; see [Note: Tape] in kernels/tape.py.
 *
 * A tape is a row of words, entry after entry: the numbers of `entry` below, the arguments, and for each argument that
 * changes from call to call its place among them and the number of the value that is added to it.
 */
#include <stddef.h>
#include <string.h>

#include "thinwire.h"

enum { NCCL_BYTES = 1, NCCL_IN_PROGRESS = 7 };

/* Of CUDA's driver and of NCCL, whose headers nobody needs to have. */
typedef int (*launch)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **args, void **extra);
typedef int (*verb)(const void *source, void *target, size_t nbytes, int type, void *communicator, void *stream);
typedef int (*ask)(void *communicator, int *state);

typedef struct {
  int64_t start; /* cuLaunchKernel, or the verb */
  int64_t kernel; /* 0: a message of source, target, bytes, communicator, and ncclCommGetAsyncError */
  int64_t grid_x, grid_y, threads, shared;
  int64_t num_args, num_changes;
} entry;

static int send(const entry *e, const uint64_t *args, void *stream) {
  void *communicator = (void *)args[3];
  int state = ((verb)e->start)((const void *)args[0], (void *)args[1], args[2], NCCL_BYTES, communicator, stream);
  while (state == NCCL_IN_PROGRESS) /* of communicators that do not block: not on the stream yet */
    if (((ask)args[4])(communicator, &state)) break;
  return state;
}

/* 0, what CUDA says is wrong, or what NCCL does, less than 0. */
TW_EXPORT int tw_play(const int64_t *tape, int64_t count, const int64_t *values, void *stream) {
  while (count--) {
    const entry *e = (const entry *)tape;
    const int64_t *given = tape + sizeof(entry) / sizeof(int64_t);
    const int64_t *changes = given + e->num_args;
    uint64_t args[TW_MOST_ARGS];
    void *places[TW_MOST_ARGS];
    memcpy(args, given, e->num_args * sizeof(int64_t));
    for (int64_t i = 0; i < e->num_args; i++) places[i] = &args[i];
    for (int64_t i = 0; i < e->num_changes; i++) args[changes[2 * i]] += (uint64_t)values[changes[2 * i + 1]];
    int code = e->kernel ? ((launch)e->start)((void *)e->kernel, e->grid_x, e->grid_y, 1, e->threads, 1, 1, e->shared,
                                              stream, places, NULL)
                         : -send(e, args, stream);
    if (code) return code;
    tape = changes + 2 * e->num_changes;
  }
  return 0;
}
