/* Where what comes from a socket goes, and its sums: into the rows, or through memory that stays in a core's own cache. */
#ifndef XPYD_RECEIVE_H
#define XPYD_RECEIVE_H

#include "_rows.h"

#define SUMMED ((size_t)256 << 10) /* of one call, where it is summed up while it is still in a core's own cache */
#define HOT ((size_t)256 << 10) /* memory that stays in a core's own cache */
#define IOV 512

/* Memory of the bytes from pos on, of at most `most` bytes in `room` stretches. */
static size_t stretches(const Scatter *self, size_t pos, size_t most, struct iovec *to, size_t room, size_t *bytes)
{
    size_t used = 0, block = pos / self->size, skip = pos % self->size;
    char *base = self->memory.buf;
    *bytes = 0;
    for (; block < self->count && *bytes < most; block++, skip = 0) {
        size_t many = self->size - skip;
        if (many > most - *bytes)
            many = most - *bytes;
        char *start = base + self->at[block] + skip;
        if (used && (char *)to[used - 1].iov_base + to[used - 1].iov_len == start)
            to[used - 1].iov_len += many;
        else if (used == room)
            break;
        else
            to[used++] = (struct iovec){start, many};
        *bytes += many;
    }
    return used;
}

static size_t at_once(const Scatter *self)
{
    return self->cover ? SUMMED : UNSUMMED;
}

static size_t piece_end(const Scatter *self, size_t piece)
{
    size_t block = piece / self->per_block, end = (piece % self->per_block + 1) * self->part;
    return block * self->size + (end < self->size ? end : self->size);
}

static void sum_piece(Scatter *self, size_t piece)
{
    size_t block = piece / self->per_block, start = piece % self->per_block * self->part;
    size_t size = self->size - start < self->part ? self->size - start : self->part;
    self->sum[piece] = sum_of((unsigned char *)self->memory.buf + self->at[block] + start, size);
}

/* Sum up the pieces that are complete. */
static void sum_up(Scatter *self)
{
    if (!self->cover)
        return;
    size_t pieces = self->count * self->per_block;
    while (self->summed < pieces && piece_end(self, self->summed) <= self->done)
        sum_piece(self, self->summed++);
}

static pthread_key_t hot_key;

/* HOT bytes of this thread; NULL: there is no memory. */
static unsigned char *hot_memory(void)
{
    unsigned char *memory = pthread_getspecific(hot_key);
    if (!memory && (memory = aligned_alloc(4096, HOT)) && pthread_setspecific(hot_key, memory)) {
        free(memory);
        memory = NULL;
    }
    return memory;
}

/* What is received of covered blocks comes to hot memory first. From there it is summed up and stored past the caches in one
 * pass: the kernel's stores into blocks would fetch their lines first, and the sum would fetch them again.
 *
 * `memory` holds the bytes of `self` from `base` on that are not in their places; at the end of a call none is left.
 */
typedef struct {
    unsigned char *memory;
    size_t base;
} Hot;

static int through(const Hot *hot, const Scatter *self)
{
    uintptr_t start = (uintptr_t)self->memory.buf + self->at[0];
    int whole = (start | self->size | self->part) % STRIPE == 0;
    return hot->memory && self->cover && carry_stripes && self->part >= ACROSS && self->part <= HOT && whole;
}

/* Where the next bytes go: to the end of a piece, so that pieces do not lie across the end of the memory. */
static size_t next_hot(Hot *hot, const Scatter *self, struct iovec *to)
{
    size_t pieces = self->count * self->per_block, piece = self->summed, end = self->done;
    for (; piece < pieces && piece_end(self, piece) - hot->base <= HOT; piece++)
        end = piece_end(self, piece);
    *to = (struct iovec){hot->memory + (self->done - hot->base), end - self->done};
    return end - self->done;
}

/* Copy bytes of one piece to their place as they are. */
static void spill(Scatter *self, size_t pos, const unsigned char *from, size_t many)
{
    memcpy((char *)self->memory.buf + self->at[pos / self->size] + pos % self->size, from, many);
}

/* Bring whole pieces to their places; with `all` what is left, too. */
static void cool(Hot *hot, Scatter *self, int all)
{
    size_t pieces = self->count * self->per_block;
    size_t start = self->summed ? piece_end(self, self->summed - 1) : 0;
    for (size_t end; self->summed < pieces && (end = piece_end(self, self->summed)) <= self->done; start = end) {
        if (start >= hot->base)
            bring(self, self->summed, hot->memory + (start - hot->base));
        else { /* it was begun in another call */
            spill(self, hot->base, hot->memory, end - hot->base);
            sum_piece(self, self->summed);
        }
        self->summed++;
    }
    if (start == self->done)
        hot->base = self->done;
    else if (all) {
        size_t from = start > hot->base ? start : hot->base;
        spill(self, from, hot->memory + (from - hot->base), self->done - from);
        hot->base = self->done;
    }
}

#endif
