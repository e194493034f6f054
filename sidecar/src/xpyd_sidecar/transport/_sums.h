/* Sums of bytes, and copies that are summed up on the way (kv/packing.py says what a sum is).
 *
 *     S = Σ (2i + 1) · m(w_i),  m(w) = w ^ w >> 32,  over 64-bit little-endian words, the last filled up with zeros
 *
 * With eight lanes, word i is in lane l = i mod 8 of stripe k = i div 8 (a stripe has 64 bytes), and 2i + 1 = 16k + 2l + 1:
 *
 *     S = Σ_l (2l + 1) · A_l + 16 · Σ_l (n · A_l - B_l),   A_l = Σ_k m,   B_l = Σ_k (n - k) · m = Σ of A_l after each stripe
 *
 * so that a stripe costs a shift, an exclusive or and two additions, and no product.
 */
#ifndef XPYD_SUMS_H
#define XPYD_SUMS_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "sums are made for little-endian machines"
#endif

#define STRIPE 64
#define LANES 8
#define ACROSS ((size_t)4 << 10) /* less is copied through the caches */

typedef struct {
    uint64_t a[LANES], b[LANES];
} Lanes;

static uint64_t mixed(uint64_t word)
{
    return word ^ word >> 32;
}

static void sum_plain(Lanes *lanes, const unsigned char *data, size_t stripes)
{
    for (; stripes; stripes--, data += STRIPE)
        for (int l = 0; l < LANES; l++) {
            uint64_t word;
            memcpy(&word, data + 8 * l, 8);
            lanes->a[l] += mixed(word);
            lanes->b[l] += lanes->a[l];
        }
}

#if defined(__x86_64__)
#define AHEAD 4096        /* bytes that are fetched before they are needed */
#define AHEAD_STORED 1024 /* the same where what is read is stored as well */
#define WITH(set) __attribute__((target(set))) static
#define BOTH(set) __attribute__((target(set), always_inline)) static inline

/* With `to`, whose address is a multiple of 64, what is summed up is stored there as well, past the caches: these bytes are read
 * next by another core or much later, and a line that is written whole need not be fetched first. */
BOTH("avx2") void both_avx2(Lanes *lanes, const unsigned char *data, size_t stripes, unsigned char *to)
{
    __m256i a[2], b[2];
    for (int i = 0; i < 2; i++) {
        a[i] = _mm256_loadu_si256((const __m256i *)lanes->a + i);
        b[i] = _mm256_loadu_si256((const __m256i *)lanes->b + i);
    }
    for (; stripes; stripes--, data += STRIPE) {
        _mm_prefetch((const char *)data + (to ? AHEAD_STORED : AHEAD), _MM_HINT_T0);
        for (int i = 0; i < 2; i++) {
            __m256i word = _mm256_loadu_si256((const __m256i *)data + i);
            if (to) {
                _mm256_stream_si256((__m256i *)to, word);
                to += 32;
            }
            a[i] = _mm256_add_epi64(a[i], _mm256_xor_si256(word, _mm256_srli_epi64(word, 32)));
            b[i] = _mm256_add_epi64(b[i], a[i]);
        }
    }
    for (int i = 0; i < 2; i++) {
        _mm256_storeu_si256((__m256i *)lanes->a + i, a[i]);
        _mm256_storeu_si256((__m256i *)lanes->b + i, b[i]);
    }
}

WITH("avx2") void sum_avx2(Lanes *lanes, const unsigned char *data, size_t stripes)
{
    both_avx2(lanes, data, stripes, NULL);
}

WITH("avx2") void carry_avx2(Lanes *lanes, const unsigned char *data, size_t stripes, unsigned char *to)
{
    both_avx2(lanes, data, stripes, to);
}

WITH("avx2") void copy_avx2(unsigned char *to, const unsigned char *from, size_t stripes)
{
    for (; stripes; stripes--, to += STRIPE, from += STRIPE) {
        _mm_prefetch((const char *)from + 2 * AHEAD_STORED, _MM_HINT_T0);
        _mm256_stream_si256((__m256i *)to, _mm256_loadu_si256((const __m256i *)from));
        _mm256_stream_si256((__m256i *)to + 1, _mm256_loadu_si256((const __m256i *)from + 1));
    }
}

BOTH("avx512f") void both_avx512(Lanes *lanes, const unsigned char *data, size_t stripes, unsigned char *to)
{
    __m512i a = _mm512_loadu_si512(lanes->a), b = _mm512_loadu_si512(lanes->b);
    for (; stripes; stripes--, data += STRIPE) {
        _mm_prefetch((const char *)data + (to ? AHEAD_STORED : AHEAD), _MM_HINT_T0);
        __m512i word = _mm512_loadu_si512(data);
        if (to) {
            _mm512_stream_si512((__m512i *)to, word);
            to += STRIPE;
        }
        a = _mm512_add_epi64(a, _mm512_xor_si512(word, _mm512_srli_epi64(word, 32)));
        b = _mm512_add_epi64(b, a);
    }
    _mm512_storeu_si512(lanes->a, a);
    _mm512_storeu_si512(lanes->b, b);
}

WITH("avx512f") void sum_avx512(Lanes *lanes, const unsigned char *data, size_t stripes)
{
    both_avx512(lanes, data, stripes, NULL);
}

WITH("avx512f") void carry_avx512(Lanes *lanes, const unsigned char *data, size_t stripes, unsigned char *to)
{
    both_avx512(lanes, data, stripes, to);
}
#endif

static void (*sum_stripes)(Lanes *, const unsigned char *, size_t) = sum_plain;
static void (*carry_stripes)(Lanes *, const unsigned char *, size_t, unsigned char *); /* NULL: not on this machine */
static void (*copy_stripes)(unsigned char *, const unsigned char *, size_t);

/* Take what this machine does fastest. */
static void choose_sums(void)
{
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2"), avx512 = avx2 && __builtin_cpu_supports("avx512f");
    sum_stripes = avx512 ? sum_avx512 : avx2 ? sum_avx2 : sum_plain;
    carry_stripes = avx512 ? carry_avx512 : avx2 ? carry_avx2 : NULL;
    copy_stripes = avx2 ? copy_avx2 : NULL;
#endif
}

/* The sum of `stripes` that are taken in and of `rest` bytes behind them. */
static uint64_t total_of(const Lanes *lanes, uint64_t stripes, const unsigned char *tail, size_t rest)
{
    uint64_t sum = 0;
    for (uint64_t l = 0; l < LANES; l++)
        sum += (2 * l + 1) * lanes->a[l] + 16 * (stripes * lanes->a[l] - lanes->b[l]);
    for (uint64_t i = LANES * stripes; rest; i++, tail += 8) {
        size_t some = rest < 8 ? rest : 8;
        uint64_t word = 0;
        memcpy(&word, tail, some);
        sum += (2 * i + 1) * mixed(word);
        rest -= some;
    }
    return sum;
}

static uint64_t sum_of(const unsigned char *data, size_t size)
{
    Lanes lanes = {0};
    size_t stripes = size / STRIPE;
    sum_stripes(&lanes, data, stripes);
    return total_of(&lanes, stripes, data + stripes * STRIPE, size - stripes * STRIPE);
}

/* Copy bytes that may change meanwhile; with `cover`, the sum of what has been written. */
static uint64_t carry(unsigned char *to, const unsigned char *from, size_t size, int cover)
{
    size_t head = -(uintptr_t)to % STRIPE, stripes = (size - head) / STRIPE, tail = size - head - stripes * STRIPE;
    if (size < ACROSS || (cover && head) || !carry_stripes) {
        memcpy(to, from, size);
        return cover ? sum_of(to, size) : 0;
    }
    if (!cover) {
        memcpy(to, from, head);
        copy_stripes(to + head, from + head, stripes);
        memcpy(to + size - tail, from + size - tail, tail);
        return 0;
    }
    Lanes lanes = {0};
    unsigned char last[STRIPE]; /* what is written there is what is summed up: it is read once */
    carry_stripes(&lanes, from, stripes, to);
    memcpy(last, from + size - tail, tail);
    memcpy(to + size - tail, last, tail);
    return total_of(&lanes, stripes, last, tail);
}

#endif
