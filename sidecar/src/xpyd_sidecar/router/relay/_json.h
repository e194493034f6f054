/* JSON as far as shortcuts read it: strictly, compact or not as each asks, and everything unusual is a case for Python.
 *
 * Every function takes where to read and where the bytes end, and returns where it stopped; NULL: it is not that, or is
 * something that Python shall judge. None reads at or beyond `end`. Each inclusion has its own copy.
 */
#ifndef XPYD_JSON_H
#define XPYD_JSON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_INTEGER 18 /* digits: fits 64 bits with its sign */

static int is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static int is_hex(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

/* One character that is not ASCII, as RFC 3629 allows it. */
static const char *utf8_end(const char *at, const char *end)
{
    const unsigned char *c = (const unsigned char *)at;
    ptrdiff_t left = end - at;
    int more;
    unsigned char low = 0x80, high = 0xbf;
    if (c[0] >= 0xc2 && c[0] <= 0xdf)
        more = 1;
    else if (c[0] >= 0xe0 && c[0] <= 0xef) {
        more = 2;
        if (c[0] == 0xe0)
            low = 0xa0;
        else if (c[0] == 0xed)
            high = 0x9f; /* no surrogates */
    } else if (c[0] >= 0xf0 && c[0] <= 0xf4) {
        more = 3;
        if (c[0] == 0xf0)
            low = 0x90;
        else if (c[0] == 0xf4)
            high = 0x8f;
    } else
        return NULL;
    if (left <= more || c[1] < low || c[1] > high)
        return NULL;
    for (int i = 2; i <= more; i++)
        if (c[i] < 0x80 || c[i] > 0xbf)
            return NULL;
    return at + more + 1;
}

/* Printable ASCII but the quote and the backslash. */
static const char is_simple[256] = {
#define XPYD_4(n) [n] = 1, [n + 1] = 1, [n + 2] = 1, [n + 3] = 1
#define XPYD_16(n) XPYD_4(n), XPYD_4(n + 4), XPYD_4(n + 8), XPYD_4(n + 12)
    [0x20] = 1, [0x21] = 1, [0x23] = 1, XPYD_4(0x24), XPYD_4(0x28), XPYD_4(0x2c), XPYD_16(0x30), XPYD_16(0x40),
    XPYD_4(0x50), XPYD_4(0x54), XPYD_4(0x58), [0x5d] = 1, [0x5e] = 1, [0x5f] = 1, XPYD_16(0x60), XPYD_4(0x70),
    XPYD_4(0x74), XPYD_4(0x78), [0x7c] = 1, [0x7d] = 1, [0x7e] = 1,
#undef XPYD_4
#undef XPYD_16
};

/* Behind characters that are simple. Eight at a time as long as they are: a byte below 0x20 or equal to one of the three
 * borrows from its high bit, one that is not ASCII has it set. */
static const char *simple_end(const char *at, const char *end)
{
    const uint64_t ones = 0x0101010101010101u, highs = ones * 0x80;
    for (uint64_t word; end - at >= (ptrdiff_t)sizeof word; at += sizeof word) {
        memcpy(&word, at, sizeof word);
        uint64_t quote = word ^ ones * '"', slash = word ^ ones * '\\', del = word ^ ones * 0x7f;
        if (((word - ones * 0x20) | (quote - ones) | (slash - ones) | (del - ones) | word) & highs)
            break;
    }
    while (at < end && is_simple[(unsigned char)*at])
        at++;
    return at;
}

/* Behind a string; `at` is its opening quote. `plain`: printable ASCII without escapes. */
static const char *string_end(const char *at, const char *end, int plain)
{
    if (at >= end || *at != '"')
        return NULL;
    for (at++;;) {
        at = simple_end(at, end);
        if (at >= end)
            return NULL;
        unsigned char c = (unsigned char)*at;
        if (c == '"')
            return at + 1;
        if (plain || c < 0x20)
            return NULL;
        if (c == '\\') {
            if (end - at < 2)
                return NULL;
            if (at[1] == 'u') {
                if (end - at < 6 || !is_hex(at[2]) || !is_hex(at[3]) || !is_hex(at[4]) || !is_hex(at[5])
                        || at[2] == 'd' || at[2] == 'D') /* perhaps half of a pair */
                    return NULL;
                at += 6;
            } else if (at[1] != '\0' && strchr("\"\\/bfnrt", at[1]) != NULL)
                at += 2;
            else
                return NULL;
        } else if (c == 0x7f)
            at++;
        else if ((at = utf8_end(at, end)) == NULL)
            return NULL;
    }
}

/* Behind an integer of at most MAX_INTEGER digits; `sign`: it may have one. */
static const char *integer_end(const char *at, const char *end, int sign)
{
    if (sign && at < end && *at == '-')
        at++;
    const char *from = at;
    while (at < end && is_digit(*at))
        at++;
    if (at == from || at - from > MAX_INTEGER || (*from == '0' && at - from > 1))
        return NULL;
    return at;
}

/* Behind `word`, if it stands there. */
static const char *word_end(const char *at, const char *end, const char *word)
{
    size_t size = strlen(word);
    return at != NULL && (size_t)(end - at) >= size && memcmp(at, word, size) == 0 ? at + size : NULL;
}

#endif
