/* Chunks of an HTTP body, read and written by shortcuts, and memory that grows for what they write.
 *
 * To be included after Python.h. Each inclusion has its own copy.
 */
#ifndef XPYD_CHUNKS_H
#define XPYD_CHUNKS_H

#include <string.h>

#define MAX_DIGITS 16
#define MAX_SIZE_LINE 9 /* of a chunk: up to seven digits and the line's end */

typedef struct {
    char *data;
    size_t size, room;
} Bytes;

static int reserve(Bytes *bytes, size_t more)
{
    if (bytes->room - bytes->size >= more)
        return 0;
    size_t room = (bytes->size + more) * 2;
    char *data = PyMem_Realloc(bytes->data, room);
    if (data == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    bytes->data = data;
    bytes->room = room;
    return 0;
}

static void put(Bytes *bytes, const char *data, size_t size)
{
    memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
}

/* The size line of a chunk; for at most MAX_DIGITS. */
static void put_size(Bytes *bytes, size_t size)
{
    char digits[MAX_DIGITS];
    int count = 0;
    do
        digits[count++] = "0123456789abcdef"[size & 15];
    while (size >>= 4);
    while (count)
        bytes->data[bytes->size++] = digits[--count];
    put(bytes, "\r\n", 2);
}

/* The payload of a chunk that begins at `at`: where it starts, and its size from the size line; NULL: not such a one. */
static const char *payload_of(const char *at, const char *end, size_t *size)
{
    const char *limit = end - at < MAX_SIZE_LINE ? end : at + MAX_SIZE_LINE;
    size_t found = 0;
    const char *digit = at;
    for (; digit < limit && *digit != '\r'; digit++) {
        char c = *digit;
        int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (value < 0)
            return NULL;
        found = found * 16 + (size_t)value;
    }
    if (digit == at || digit + 1 >= limit || digit[1] != '\n' || found == 0)
        return NULL;
    *size = found;
    return digit + 2;
}

#endif
