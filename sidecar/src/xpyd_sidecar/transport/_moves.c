/* Bytes between a socket, or memory shared with another process, and scattered blocks, summed up on the way, without the interpreter.
 *
 *     Scatter(memory, size, count, ids, stride, offset, cover)    count blocks of size bytes; the nth lies at
 *                                                                 memory + ids[n] * stride + offset; ids None: n * size
 *     Scatter.receive(fd, tail, patience_ms, low, follow, watch, beside)
 *                                                                 from a socket; then what follows them, into tail
 *     Scatter.read(address, ticket_at, ticket, threads)           from memory that another process has, too
 *     Scatter.copy(address)                                       from this process's own
 *     Scatter.sums()                                              as of sums(), of what has come
 *     sums(data, size)                                            of packed blocks of size bytes, 8 bytes for each piece
 *     receive(fd, tail, patience_ms, low, follow, watch, beside)  the same from the header of the first of follow on
 *     send(fd, views, patience_ms, watch, beside)                 into a socket
 *     come_home()                                                 may run on all processors again, after calls with beside
 *
 * Belongs here: loops over system calls. What a frame is and where blocks belong is said in Python, and `plain` has the same
 * in Python alone. The sum of a piece (at most 64 KiB of one block) is XXH3_64 with its default secret and seed 0
 * (github.com/Cyan4973/xxHash, doc/xxhash_spec.md); pieces below 256 bytes are padded with zeros to that, so that the algorithm
 * for long inputs is all that is needed.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "sums are made for little-endian machines"
#endif

#define REVISION 7 /* the same as in plain.py: one that was built for other files is not loaded */
#define PIECE ((size_t)64 << 10)
#define PADDED 256
#define SUMMED ((size_t)256 << 10) /* of one call, where it is summed up while it is still in a core's own cache */
#define HOT ((size_t)256 << 10) /* memory that stays in a core's own cache */
#define UNSUMMED ((size_t)1 << 20) /* the same where it is not */
#define IOV 512
#define WAKE (256 << 10) /* a reader in the middle of a frame is woken for no less */
#define FOLLOW 64 /* frames after the first that one call takes */
#define HEADER 64 /* bytes of a frame's header */
#define KNOWN 48  /* of them, what is known of a frame that is expected */
#define TURN_US 40000 /* no call waits longer than this for a peer that sends little by little */
#define LOOK_US 400 /* how often a call looks whether anything else is ready, which ends it */
#define TICKET 32
#define ACROSS ((size_t)4 << 10) /* less is copied through the caches */
#define SPLIT ((size_t)512 << 10) /* less is not worth a thread */
#define BATCH ((size_t)256 << 10) /* of it, what a thread takes at a time */
#define HELPERS 4

/* ---- XXH3_64, inputs above 240 bytes */

#define P32_1 0x9E3779B1U
#define P32_2 0x85EBCA77U
#define P32_3 0xC2B2AE3DU
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL

static const unsigned char secret[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t load(const unsigned char *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

/* Takes in `rounds` rounds of 1,024 bytes, each ended by a scramble, then `rest` stripes of 64 bytes.
 *
 * With `to`, whose address is a multiple of 64, what was taken in is stored there as well, past the caches: these bytes are
 * read next by another core or much later, and a line that is written whole need not be fetched first.
 */
static void take_plain(uint64_t *acc, const unsigned char *data, size_t rounds, size_t rest)
{
    for (size_t round = 0; round <= rounds; round++) {
        for (size_t n = 0; n < (round < rounds ? 16 : rest); n++, data += 64)
            for (int i = 0; i < 8; i++) {
                uint64_t value = load(data + 8 * i), key = value ^ load(secret + n * 8 + 8 * i);
                acc[i ^ 1] += value;
                acc[i] += (key & 0xffffffff) * (key >> 32);
            }
        for (int i = 0; round < rounds && i < 8; i++)
            acc[i] = (acc[i] ^ acc[i] >> 47 ^ load(secret + 128 + 8 * i)) * P32_1;
    }
}

#if defined(__x86_64__)
#define AHEAD 4096      /* bytes that are fetched before they are needed */
#define AHEAD_STORED 1024 /* the same where what is read is stored as well */

#define WITH(set) __attribute__((target(set))) static
#define BOTH(set) __attribute__((target(set), always_inline)) static inline

BOTH("avx2") void both_avx2(uint64_t *acc, const unsigned char *data, size_t rounds, size_t rest, unsigned char *to)
{
    const __m256i prime = _mm256_set1_epi32((int)P32_1);
    __m256i sum[2] = {_mm256_loadu_si256((const __m256i *)acc), _mm256_loadu_si256((const __m256i *)acc + 1)};
    for (size_t round = 0; round <= rounds; round++) {
        size_t many = round < rounds ? 16 : rest;
#pragma GCC unroll 8
        for (size_t n = 0; n < many; n++, data += 64) {
            _mm_prefetch((const char *)data + (to ? AHEAD_STORED : AHEAD), _MM_HINT_T0);
            for (int i = 0; i < 2; i++) {
                __m256i value = _mm256_loadu_si256((const __m256i *)data + i);
                if (to) {
                    _mm256_stream_si256((__m256i *)to, value);
                    to += 32;
                }
                __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)(secret + n * 8) + i));
                __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
                sum[i] = _mm256_add_epi64(_mm256_add_epi64(sum[i], _mm256_shuffle_epi32(value, 0x4e)), product);
            }
        }
        for (int i = 0; round < rounds && i < 2; i++) {
            __m256i one = _mm256_xor_si256(sum[i], _mm256_srli_epi64(sum[i], 47));
            one = _mm256_xor_si256(one, _mm256_loadu_si256((const __m256i *)(secret + 128) + i));
            __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(one, 32), prime), 32);
            sum[i] = _mm256_add_epi64(_mm256_mul_epu32(one, prime), high);
        }
    }
    _mm256_storeu_si256((__m256i *)acc, sum[0]);
    _mm256_storeu_si256((__m256i *)acc + 1, sum[1]);
}

WITH("avx2") void take_avx2(uint64_t *acc, const unsigned char *data, size_t rounds, size_t rest)
{
    both_avx2(acc, data, rounds, rest, NULL);
}

WITH("avx2") void carry_avx2(uint64_t *acc, const unsigned char *data, size_t rounds, size_t rest, unsigned char *to)
{
    both_avx2(acc, data, rounds, rest, to);
}

WITH("avx2") void copy_avx2(unsigned char *to, const unsigned char *from, size_t stripes)
{
    for (; stripes; stripes--, to += 64, from += 64) {
        _mm_prefetch((const char *)from + 2 * AHEAD_STORED, _MM_HINT_T0);
        _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
        _mm256_stream_si256((__m256i *)to + 1, _mm256_loadu_si256((const __m256i *)from + 1));
    }
}

BOTH("avx512f") void both_avx512(uint64_t *acc, const unsigned char *data, size_t rounds, size_t rest, unsigned char *to)
{
    const __m512i prime = _mm512_set1_epi32((int)P32_1);
    __m512i sum = _mm512_loadu_si512(acc);
    for (size_t round = 0; round <= rounds; round++) {
        size_t many = round < rounds ? 16 : rest;
#pragma GCC unroll 8
        for (size_t n = 0; n < many; n++, data += 64) {
            _mm_prefetch((const char *)data + (to ? AHEAD_STORED : AHEAD), _MM_HINT_T0);
            __m512i value = _mm512_loadu_si512(data), key = _mm512_xor_si512(value, _mm512_loadu_si512(secret + n * 8));
            if (to) {
                _mm512_stream_si512((__m512i *)to, value);
                to += 64;
            }
            __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
            sum = _mm512_add_epi64(sum, _mm512_add_epi64(_mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4e), product));
        }
        if (round < rounds) {
            __m512i one = _mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47));
            one = _mm512_xor_si512(one, _mm512_loadu_si512(secret + 128));
            __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(one, 32), prime), 32);
            sum = _mm512_add_epi64(_mm512_mul_epu32(one, prime), high);
        }
    }
    _mm512_storeu_si512(acc, sum);
}

WITH("avx512f") void take_avx512(uint64_t *acc, const unsigned char *data, size_t rounds, size_t rest)
{
    both_avx512(acc, data, rounds, rest, NULL);
}

WITH("avx512f") void carry_avx512(uint64_t *acc, const unsigned char *data, size_t rounds, size_t rest,
                                         unsigned char *to)
{
    both_avx512(acc, data, rounds, rest, to);
}
#endif

static void (*take)(uint64_t *, const unsigned char *, size_t, size_t) = take_plain;
static void (*take_across)(uint64_t *, const unsigned char *, size_t, size_t, unsigned char *); /* NULL: not on this machine */
static void (*copy_across)(unsigned char *, const unsigned char *, size_t);

static uint64_t fold(uint64_t one, uint64_t other)
{
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* The sum of `size` bytes, of which all whole stripes but the last are taken in; `last`: the last 64. */
static uint64_t finish(uint64_t *acc, const unsigned char *last, size_t size)
{
    for (int i = 0; i < 8; i++) { /* with a part of the secret that has no multiple of 8 */
        uint64_t value = load(last + 8 * i), key = value ^ load(secret + 121 + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (key & 0xffffffff) * (key >> 32);
    }
    uint64_t sum = size * P64_1;
    for (int i = 0; i < 4; i++)
        sum += fold(acc[2 * i] ^ load(secret + 11 + 16 * i), acc[2 * i + 1] ^ load(secret + 19 + 16 * i));
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9ULL;
    return sum ^ sum >> 32;
}

#define BEGIN {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}

static uint64_t xxh3(const unsigned char *data, size_t size)
{
    unsigned char padded[PADDED];
    if (size < PADDED) {
        memcpy(padded, data, size);
        memset(padded + size, 0, PADDED - size);
        data = padded;
        size = PADDED;
    }
    uint64_t acc[8] = BEGIN;
    size_t rounds = (size - 1) / 1024;
    take(acc, data, rounds, (size - 1 - rounds * 1024) / 64);
    return finish(acc, data + size - 64, size);
}

/* Copy bytes that may change meanwhile; with `cover`, the sum of what has been written. */
static uint64_t carry(unsigned char *to, const unsigned char *from, size_t size, int cover)
{
    size_t head = -(uintptr_t)to % 64, stripes = (size - head) / 64, tail = size - head - stripes * 64;
    if (size < ACROSS || (cover && head) || !take_across) {
        memcpy(to, from, size);
        return cover ? xxh3(to, size) : 0;
    }
    if (!cover) {
        memcpy(to, from, head);
        copy_across(to + head, from + head, stripes);
        memcpy(to + size - tail, from + size - tail, tail);
        return 0;
    }
    uint64_t acc[8] = BEGIN;
    size_t rounds = (size - 1) / 1024;
    unsigned char last[64]; /* what is written there is what is summed up: it is read once */
    take_across(acc, from, rounds, (size - 1 - rounds * 1024) / 64, to);
    memcpy(last, from + size - 64, 64);
    memcpy(to + size - 64, last, 64);
    return finish(acc, last, size);
}

/* ---- Scatter */

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    char held, cover;
    size_t size, count, total, done;
    size_t *at;                 /* where each block begins in memory */
    size_t per_block, summed;   /* pieces of a block; pieces whose sum is made */
    uint64_t *sum;
    int low;
} Scatter;

static PyTypeObject *scatter_type;

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
    size_t block = piece / self->per_block, end = (piece % self->per_block + 1) * PIECE;
    return block * self->size + (end < self->size ? end : self->size);
}

static void sum_piece(Scatter *self, size_t piece)
{
    size_t block = piece / self->per_block, start = piece % self->per_block * PIECE;
    size_t size = self->size - start < PIECE ? self->size - start : PIECE;
    self->sum[piece] = xxh3((unsigned char *)self->memory.buf + self->at[block] + start, size);
}

/* Bring a piece that lies at `from` to its place. */
static void bring(Scatter *self, size_t piece, const unsigned char *from)
{
    size_t block = piece / self->per_block, start = piece % self->per_block * PIECE;
    size_t size = self->size - start < PIECE ? self->size - start : PIECE;
    uint64_t sum = carry((unsigned char *)self->memory.buf + self->at[block] + start, from, size, self->cover);
    if (self->cover)
        self->sum[piece] = sum;
}

/* Bring a piece from memory in which all blocks lie one after the other. */
static void carry_piece(Scatter *self, size_t piece, const unsigned char *packed)
{
    bring(self, piece, packed + piece / self->per_block * self->size + piece % self->per_block * PIECE);
}

/* What has been read was read before what is read next, and what was written is seen by others. */
static void fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
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
    return hot->memory && self->cover && take_across && self->size >= ACROSS && (start | self->size) % 64 == 0;
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

static int place_blocks(Scatter *self, PyObject *ids, Py_ssize_t stride, Py_ssize_t offset)
{
    Py_buffer found = {0};
    const int64_t *numbers = NULL;
    if (ids != Py_None) {
        if (PyObject_GetBuffer(ids, &found, PyBUF_SIMPLE) < 0)
            return -1;
        numbers = found.buf;
    }
    int wrong = ids != Py_None && (size_t)found.len != self->count * sizeof(int64_t);
    size_t room = (size_t)self->memory.len;
    for (size_t n = 0; n < self->count && !wrong; n++) {
        if (!numbers)
            self->at[n] = n * self->size;
        else if (numbers[n] < 0 || (stride && (uint64_t)numbers[n] > room / (size_t)stride))
            wrong = 1;
        else
            self->at[n] = (size_t)numbers[n] * (size_t)stride + (size_t)offset;
        wrong = wrong || self->size > room || self->at[n] > room - self->size;
    }
    if (ids != Py_None)
        PyBuffer_Release(&found);
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "blocks outside of the memory");
    return wrong ? -1 : 0;
}

static PyObject *scatter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *memory, *ids;
    Py_ssize_t size, count, stride, offset;
    int cover;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OnnOnnp", &memory, &size, &count, &ids, &stride, &offset, &cover))
        return NULL;
    if (size < 1 || count < 1 || stride < 0 || offset < 0 || count > PY_SSIZE_T_MAX / size / 16) {
        PyErr_SetString(PyExc_ValueError, "no blocks, or too many");
        return NULL;
    }
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Scatter *self = (Scatter *)make(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        goto failed;
    self->held = 1;
    self->size = (size_t)size;
    self->count = (size_t)count;
    self->total = self->size * self->count;
    self->cover = (char)cover;
    self->low = 1;
    self->per_block = (self->size + PIECE - 1) / PIECE;
    self->at = PyMem_Malloc(self->count * sizeof *self->at);
    if (cover)
        self->sum = PyMem_Malloc(self->count * self->per_block * sizeof *self->sum);
    if (!self->at || (cover && !self->sum)) {
        PyErr_NoMemory();
        goto failed;
    }
    if (place_blocks(self, ids, stride, offset) < 0)
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void scatter_free(Scatter *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->held)
        PyBuffer_Release(&self->memory);
    PyMem_Free(self->at);
    PyMem_Free(self->sum);
    freefunc give = (freefunc)PyType_GetSlot(type, Py_tp_free);
    give(self);
    Py_DECREF(type);
}

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* How long a call may go on: it waits only where nothing else is ready, and ends when something is. */
typedef struct {
    int fd, watch; /* the socket; an epoll instance that watches it and all others of the thread, or -1 */
    int beside;    /* its peer is on this host */
    int64_t patience, began, until, look;
} Turn;

static Turn begin(int fd, int watch, int patience, int beside)
{
    int64_t now = patience > 0 ? now_us() : 0;
    return (Turn){fd, watch, beside, patience * 1000, now, now + patience * 1000, now + LOOK_US};
}

static int others(const Turn *turn)
{
    struct epoll_event ready[2];
    int many = turn->watch < 0 ? 0 : epoll_wait(turn->watch, ready, 2, 0);
    for (int n = 0; n < many; n++)
        if (ready[n].data.fd != turn->fd)
            return 1;
    return 0;
}

/* Bytes have moved: wait longer. Whether the call may go on. */
static int go_on(Turn *turn)
{
    if (turn->patience <= 0)
        return 1;
    int64_t now = now_us(), last = turn->began + TURN_US;
    turn->until = now + turn->patience < last ? now + turn->patience : last;
    if (now < turn->look)
        return 1;
    turn->look = now + LOOK_US;
    return !others(turn);
}

/* After EAGAIN: whether the socket is ready within a millisecond, in time, and nothing else is. */
static int ready_soon(Turn *turn, short events)
{
    struct pollfd ready = {turn->fd, events, 0};
    return now_us() < turn->until && poll(&ready, 1, 1) > 0 && !others(turn);
}

/* Where this thread may run, if that is narrowed now. */
static _Thread_local struct {
    cpu_set_t all;
    int narrowed;
} home;

/* What a peer beside sends, and what it acknowledges, is handed over on the processor that it runs on, and the kernel likes to
 * wake who waits for it there. Then each of the two waits for the other, on one processor. So who has waited leaves it; a writer
 * only if it was brought there from another one (`before`, else -1).
 */
static void go_elsewhere(int fd, int before)
{
    int from = -1, here = sched_getcpu();
    socklen_t size = sizeof from;
    if (here < 0 || here == before || getsockopt(fd, SOL_SOCKET, SO_INCOMING_CPU, &from, &size) < 0 || from != here)
        return;
    if (!home.narrowed && sched_getaffinity(0, sizeof home.all, &home.all) < 0)
        return; /* more processors than the set has room for */
    cpu_set_t elsewhere = home.all;
    CPU_CLR((size_t)here, &elsewhere);
    if (CPU_COUNT(&elsewhere) && sched_setaffinity(0, sizeof elsewhere, &elsewhere) == 0)
        home.narrowed = 1;
}

typedef struct {
    const char *head; /* what its header begins with */
    Scatter *scatter;
} Frame;

/* Bytes received, of headers and of the tail included; -1 with errno.
 *
 * Where the tail holds the header of the next expected frame, that frame is received, too, and its header kept in `taken`.
 * One that begins with other bytes ends the call. Where what is known is the same, so are the place and the length: the
 * header's own sum is left to who looks at it afterwards. Without `self` the first header is that of an expected frame.
 */
static ssize_t pull(Scatter *self, Turn turn, char *tail, size_t room, const Frame *next, size_t many, char *taken,
                    size_t *took)
{
    Scatter *first = self ? self : next->scatter;
    Hot hot = {first->cover ? hot_memory() : NULL, self ? self->done : 0};
    ssize_t all = 0, got = 0;
    size_t in_tail = 0;
    for (;;) {
        size_t missing = self ? self->total - self->done : 0;
        if (!missing) {
            if (!many || (in_tail == HEADER && memcmp(tail, next->head, KNOWN)))
                break;
            if (in_tail == HEADER) {
                memcpy(taken + HEADER * (*took)++, tail, HEADER);
                self = next++->scatter;
                hot.base = self->done;
                many--;
                in_tail = 0;
                continue;
            }
        }
        struct iovec to[IOV + 1];
        size_t bytes = 0, used = 0;
        if (missing && through(&hot, self))
            bytes = next_hot(&hot, self, to), used = 1;
        else if (missing)
            used = stretches(self, self->done, at_once(self), to, IOV, &bytes);
        if (bytes == missing && room)
            to[used++] = (struct iovec){tail + in_tail, room - in_tail};
        struct msghdr message = {.msg_iov = to, .msg_iovlen = used};
        got = recvmsg(turn.fd, &message, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && turn.patience > 0) {
            int low = missing < WAKE ? 1 : missing > 2 * WAKE ? WAKE : first->low; /* the end of a frame would not wake */
            if (low != first->low && setsockopt(turn.fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) == 0)
                first->low = low;
            if (ready_soon(&turn, POLLIN)) {
                if (turn.beside)
                    go_elsewhere(turn.fd, -1);
                continue;
            }
            errno = EAGAIN;
        }
        if (got <= 0)
            break;
        all += got;
        size_t of_blocks = (size_t)got < missing ? (size_t)got : missing;
        if (self) {
            self->done += of_blocks;
            if (through(&hot, self))
                cool(&hot, self, 0);
            else
                sum_up(self);
        }
        in_tail += (size_t)got - of_blocks;
        if (!go_on(&turn))
            break;
    }
    if (self && through(&hot, self))
        cool(&hot, self, 1);
    fence();
    return all ? all : got;
}

static PyObject *failure(int code)
{
    errno = code;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* The frames in a tuple of (what its header begins with, Scatter), one after the other; -1: it is not one. */
static Py_ssize_t frames_of(PyObject *follow, Frame *out)
{
    Py_ssize_t size = PyTuple_Size(follow), many = size / 2;
    if (size < 0 || many > FOLLOW || size % 2)
        goto wrong;
    for (Py_ssize_t n = 0; n < many; n++) {
        PyObject *head = PyTuple_GetItem(follow, 2 * n), *scatter = PyTuple_GetItem(follow, 2 * n + 1);
        if (!PyBytes_Check(head) || PyBytes_Size(head) != KNOWN || !PyObject_TypeCheck(scatter, scatter_type))
            goto wrong;
        out[n] = (Frame){PyBytes_AsString(head), (Scatter *)scatter};
    }
    return many;
wrong:
    PyErr_Format(PyExc_ValueError, "at most %d frames, each %d bytes and a Scatter", FOLLOW, KNOWN);
    return -1;
}

static PyObject *receive(Scatter *self, PyObject *args)
{
    int fd, patience, low, watch = -1, beside = 0;
    Py_buffer tail;
    PyObject *follow;
    if (!PyArg_ParseTuple(args, "iw*iiO!|ip", &fd, &tail, &patience, &low, &PyTuple_Type, &follow, &watch, &beside))
        return NULL;
    Frame next[FOLLOW];
    char taken[FOLLOW * HEADER];
    size_t took = 0;
    Py_ssize_t many = frames_of(follow, next);
    if (many > 0 && tail.len != HEADER) {
        PyErr_SetString(PyExc_ValueError, "a tail that is no header");
        many = -1;
    }
    if (!many && !self) {
        PyErr_SetString(PyExc_ValueError, "no frame is expected");
        many = -1;
    }
    if (many < 0) {
        PyBuffer_Release(&tail);
        return NULL;
    }
    ssize_t got;
    int code;
    (self ? self : next->scatter)->low = low;
    Py_BEGIN_ALLOW_THREADS
    got = pull(self, begin(fd, watch, patience, beside), tail.buf, (size_t)tail.len, next, (size_t)many, taken, &took);
    code = errno;
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&tail);
    return got < 0 ? failure(code) : Py_BuildValue("(ny#)", (Py_ssize_t)got, taken, (Py_ssize_t)(took * HEADER));
}

static PyObject *scatter_receive(Scatter *self, PyObject *args)
{
    return receive(self, args);
}

static PyObject *moves_receive(PyObject *module, PyObject *args)
{
    (void)module;
    return receive(NULL, args);
}

/* One reading of memory that another process has, mapped here, by the thread that was asked to and perhaps a helper: each takes a batch of pieces
 * that nobody has taken. So it does not matter when the helper begins, and nobody waits for one that has not begun: it finds
 * nothing to take, and lets go of this. Guarded by `lock` from `next` on.
 */
typedef struct {
    Scatter *self; /* used only with a batch that was taken: the call waits for who has one */
    const unsigned char *from;
    const char *ticket_at;
    char ticket[TICKET];
    size_t pieces, batch;
    pthread_mutex_t lock;
    pthread_cond_t over;
    size_t next; /* the first piece that nobody has taken */
    int inside;  /* whether the helper has begun, and not ended */
    int owners;
    int wiped; /* the ticket is another */
} Reading;

static int helpers; /* that have not ended: no more than HELPERS */

static void let_go(Reading *job)
{
    pthread_mutex_lock(&job->lock);
    int last = --job->owners == 0;
    pthread_mutex_unlock(&job->lock);
    if (last) {
        pthread_cond_destroy(&job->over);
        pthread_mutex_destroy(&job->lock);
        free(job);
    }
}

/* The next batch from `first` on, as where it ends; 0: there is none. */
static size_t take_batch(Reading *job, size_t *first)
{
    pthread_mutex_lock(&job->lock);
    size_t left = job->pieces - job->next, many = left < job->batch ? left : job->batch;
    *first = job->next;
    job->next += many;
    pthread_mutex_unlock(&job->lock);
    return many ? *first + many : 0;
}

/* All batches that are left, from one that this thread has taken on. */
static void read_batches(Reading *job, size_t first, size_t end)
{
    do {
        for (size_t piece = first; piece < end; piece++)
            carry_piece(job->self, piece, job->from);
    } while ((end = take_batch(job, &first)));
    fence();
    if (!memcmp(job->ticket_at, job->ticket, TICKET)) /* looked at after the bytes */
        return;
    pthread_mutex_lock(&job->lock);
    job->wiped = 1;
    pthread_mutex_unlock(&job->lock);
}

static void *help(void *argument)
{
    Reading *job = argument;
    size_t first, end;
    pthread_mutex_lock(&job->lock);
    job->inside = 1;
    pthread_mutex_unlock(&job->lock);
    if ((end = take_batch(job, &first)))
        read_batches(job, first, end);
    pthread_mutex_lock(&job->lock);
    job->inside = 0;
    pthread_cond_signal(&job->over);
    pthread_mutex_unlock(&job->lock);
    let_go(job);
    __atomic_sub_fetch(&helpers, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

/* A helper on another processor than this one: left to the kernel, it begins here when this thread has done all. */
static void get_help(Reading *job)
{
    cpu_set_t others;
    int here = sched_getcpu();
    if (home.narrowed)
        others = home.all;
    else if (sched_getaffinity(0, sizeof others, &others) < 0)
        return;
    if (here >= 0)
        CPU_CLR((size_t)here, &others);
    pthread_attr_t how;
    if (!CPU_COUNT(&others) || pthread_attr_init(&how))
        return;
    pthread_t thread;
    sigset_t every, before; /* signals are for the interpreter's threads */
    sigfillset(&every);
    if (__atomic_add_fetch(&helpers, 1, __ATOMIC_SEQ_CST) > HELPERS || pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED)
        || pthread_attr_setaffinity_np(&how, sizeof others, &others) || pthread_sigmask(SIG_SETMASK, &every, &before)) {
        __atomic_sub_fetch(&helpers, 1, __ATOMIC_SEQ_CST);
    } else {
        job->owners = 2;
        if (pthread_create(&thread, &how, help, job)) {
            job->owners = 1;
            __atomic_sub_fetch(&helpers, 1, __ATOMIC_SEQ_CST);
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_attr_destroy(&how);
}

static PyObject *scatter_read(Scatter *self, PyObject *args)
{
    int threads;
    unsigned long long address, ticket_at;
    const char *ticket;
    Py_ssize_t ticket_size;
    if (!PyArg_ParseTuple(args, "KKy#i", &address, &ticket_at, &ticket, &ticket_size, &threads))
        return NULL;
    if (ticket_size != TICKET)
        return PyErr_Format(PyExc_ValueError, "a ticket has %d bytes", TICKET);
    Reading *job = calloc(1, sizeof *job);
    if (!job)
        return PyErr_NoMemory();
    *job = (Reading){.self = self, .from = (const unsigned char *)(uintptr_t)address, .owners = 1,
                     .ticket_at = (const char *)(uintptr_t)ticket_at, .pieces = self->count * self->per_block};
    memcpy(job->ticket, ticket, TICKET);
    job->batch = job->pieces; /* as many as come to BATCH bytes, where there is a helper */
    if (threads > 1 && self->total >= SPLIT && self->total / job->pieces)
        job->batch = BATCH / (self->total / job->pieces) + 1;
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->over, NULL);
    Py_BEGIN_ALLOW_THREADS
    if (job->batch < job->pieces)
        get_help(job);
    size_t first, end = take_batch(job, &first);
    if (end)
        read_batches(job, first, end);
    pthread_mutex_lock(&job->lock);
    while (job->inside)
        pthread_cond_wait(&job->over, &job->lock);
    pthread_mutex_unlock(&job->lock);
    Py_END_ALLOW_THREADS
    int wiped = job->wiped;
    size_t pieces = job->pieces;
    let_go(job);
    if (!wiped) {
        self->done = self->total;
        self->summed = pieces;
    }
    return PyBool_FromLong(!wiped);
}

static PyObject *scatter_copy(Scatter *self, PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K", &address))
        return NULL;
    const unsigned char *from = (const unsigned char *)(uintptr_t)address;
    size_t pieces = self->count * self->per_block;
    Py_BEGIN_ALLOW_THREADS
    for (size_t piece = 0; piece < pieces; piece++)
        carry_piece(self, piece, from);
    fence();
    Py_END_ALLOW_THREADS
    self->done = self->total;
    self->summed = pieces;
    Py_RETURN_NONE;
}

static PyObject *scatter_sums(Scatter *self, PyObject *unused)
{
    (void)unused;
    return PyBytes_FromStringAndSize((const char *)self->sum, self->cover ? (Py_ssize_t)(self->summed * 8) : 0);
}

static PyObject *scatter_missing(Scatter *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->total - self->done);
}

static PyMethodDef scatter_methods[] = {
    {"receive", (PyCFunction)scatter_receive, METH_VARARGS, NULL},
    {"read", (PyCFunction)scatter_read, METH_VARARGS, NULL},
    {"copy", (PyCFunction)scatter_copy, METH_VARARGS, NULL},
    {"sums", (PyCFunction)scatter_sums, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef scatter_fields[] = {{"missing", (getter)scatter_missing, NULL, NULL, NULL}, {0}};

static PyMemberDef scatter_members[] = {{"low", T_INT, offsetof(Scatter, low), READONLY, NULL}, {0}};

static PyType_Slot scatter_slots[] = {
    {Py_tp_new, scatter_new},         {Py_tp_dealloc, scatter_free},    {Py_tp_methods, scatter_methods},
    {Py_tp_getset, scatter_fields},   {Py_tp_members, scatter_members}, {0, NULL},
};

static PyType_Spec scatter_spec = {"xpyd_sidecar.transport._moves.Scatter", sizeof(Scatter), 0, Py_TPFLAGS_DEFAULT,
                                   scatter_slots};

/* ---- of the module */

static PyObject *moves_sums(PyObject *module, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*n", &data, &size))
        return NULL;
    if (size < 1 || data.len % size) {
        PyBuffer_Release(&data);
        PyErr_SetString(PyExc_ValueError, "not whole blocks");
        return NULL;
    }
    size_t each = (size_t)size, count = (size_t)(data.len / size), pieces = (each + PIECE - 1) / PIECE;
    PyObject *out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * pieces * 8));
    if (out) {
        char *put = PyBytes_AsString(out);
        const unsigned char *from = data.buf;
        Py_BEGIN_ALLOW_THREADS
        for (size_t block = 0; block < count; block++)
            for (size_t start = 0; start < each; start += PIECE, put += 8) {
                uint64_t sum = xxh3(from + block * each + start, each - start < PIECE ? each - start : PIECE);
                memcpy(put, &sum, 8);
            }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return out;
}

/* Bytes sent; -1 with errno. */
static ssize_t push(Turn turn, struct iovec *from, size_t many)
{
    ssize_t all = 0, sent = 0;
    while (many) {
        struct msghdr message = {.msg_iov = from, .msg_iovlen = many};
        sent = sendmsg(turn.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && turn.patience > 0) {
            int before = sched_getcpu();
            if (ready_soon(&turn, POLLOUT)) {
                if (turn.beside)
                    go_elsewhere(turn.fd, before);
                continue;
            }
            errno = EAGAIN;
        }
        if (sent < 0)
            break;
        all += sent;
        for (size_t left = (size_t)sent; many && left >= from->iov_len; from++, many--)
            left -= from->iov_len, sent -= (ssize_t)from->iov_len;
        if (many) {
            from->iov_base = (char *)from->iov_base + sent;
            from->iov_len -= (size_t)sent;
        }
        if (!go_on(&turn))
            break;
    }
    return all ? all : sent;
}

static PyObject *moves_send(PyObject *module, PyObject *args)
{
    int fd, patience, watch = -1, beside = 0;
    PyObject *views;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOi|ip", &fd, &views, &patience, &watch, &beside))
        return NULL;
    Py_buffer held[64];
    struct iovec from[64];
    Py_ssize_t many = PySequence_Size(views), got = 0;
    PyObject *result = NULL;
    if (many < 0)
        return NULL;
    if (many > 64)
        many = 64;
    for (; got < many; got++) {
        PyObject *one = PySequence_GetItem(views, got);
        int failed = !one || PyObject_GetBuffer(one, &held[got], PyBUF_SIMPLE) < 0;
        Py_XDECREF(one);
        if (failed)
            goto end;
        from[got] = (struct iovec){held[got].buf, (size_t)held[got].len};
    }
    ssize_t sent;
    int code;
    Py_BEGIN_ALLOW_THREADS
    sent = push(begin(fd, watch, patience, beside), from, (size_t)many);
    code = errno;
    Py_END_ALLOW_THREADS
    result = sent < 0 ? failure(code) : PyLong_FromSsize_t(sent);
end:
    while (got--)
        PyBuffer_Release(&held[got]);
    return result;
}

static PyObject *moves_come_home(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (home.narrowed) {
        sched_setaffinity(0, sizeof home.all, &home.all);
        home.narrowed = 0;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"come_home", moves_come_home, METH_NOARGS, NULL},
    {"sums", moves_sums, METH_VARARGS, NULL},
    {"receive", moves_receive, METH_VARARGS, NULL},
    {"send", moves_send, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_moves", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__moves(void)
{
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2"), avx512 = avx2 && __builtin_cpu_supports("avx512f");
    take = avx512 ? take_avx512 : avx2 ? take_avx2 : take_plain;
    take_across = avx512 ? carry_avx512 : avx2 ? carry_avx2 : NULL;
    copy_across = avx2 ? copy_avx2 : NULL;
#endif
    if (pthread_key_create(&hot_key, free))
        return PyErr_NoMemory();
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    scatter_type = (PyTypeObject *)PyType_FromSpec(&scatter_spec);
    if (!scatter_type || PyModule_AddObjectRef(made, "Scatter", (PyObject *)scatter_type) < 0 ||
        PyModule_AddIntConstant(made, "REVISION", REVISION) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
