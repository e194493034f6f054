/* Rows of memory that bytes come into, and their sums, as loops without the interpreter see them. What makes them is in
 * `_scatter.h`; what fills them, in `_moves.c` (of memory) and `_receive.h` (of a socket); what a sum is, in `_sums.h`. */
#ifndef XPYD_ROWS_H
#define XPYD_ROWS_H

#include "_sums.h"

#define UNSUMMED ((size_t)1 << 20) /* copied in one piece where nothing is summed up */

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    char held;
    size_t size, count, total, done;
    size_t part;                /* bytes of a row that have a sum; without sums, as many as are copied at once */
    int cover;
    size_t *at;                 /* where each block begins in memory */
    size_t per_block, summed;   /* pieces of a block; pieces whose sum is made */
    uint64_t *sum;
} Scatter;

/* Bring a piece that lies at `from` to its place. */
static void bring(Scatter *self, size_t piece, const unsigned char *from)
{
    size_t block = piece / self->per_block, start = piece % self->per_block * self->part;
    size_t size = self->size - start < self->part ? self->size - start : self->part;
    uint64_t sum = carry((unsigned char *)self->memory.buf + self->at[block] + start, from, size, self->cover);
    if (self->cover)
        self->sum[piece] = sum;
}

/* What has been read was read before what is read next, and what was written is seen by others. */
static void fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

#endif
