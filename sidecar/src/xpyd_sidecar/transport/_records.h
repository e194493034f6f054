/* Records of a stripe whose service encrypts KV: what leaves is sealed here, what has come is opened and brought to its rows.
 *
 *     decode  ▶ request + tag                                                     prefill ▶ header + tag | bytes + tag | …
 *
 * Bytes of a piece are in records of RECORD bytes, the last one shorter. Both ends know what comes next, so nothing says it.
 * What has come is in memory of the stripe until its tag was found right; nothing of a record that is wrong goes further.
 */
#ifndef XPYD_RECORDS_H
#define XPYD_RECORDS_H

#include "_aead.h"
#include "_stripes.h"

#define RECORD ((size_t)64 << 10)
#define SMALL ((size_t)2 << 10) /* shorter stretches are gathered before they are sealed, each call has its price */
#define KEYS (2 * AEAD_KEY)     /* of what decode says, and of what prefill says */

typedef struct {
    RecordCipher requests, answers;
    uint64_t sealed; /* decode: requests */
    size_t size, at; /* prefill: bytes that are to leave, and of them those that have; decode: `at` of a record have come */
    Lanes lanes;     /* of the part of a row that is being summed up */
    unsigned char bytes[HEADER + TAG + RECORD + TAG];
} Records;

static void free_records(Records *records)
{
    if (!records)
        return;
    free_cipher(&records->requests);
    free_cipher(&records->answers);
    free(records);
}

/* NULL: there is no memory. */
static Records *make_records(const unsigned char *keys, int serves)
{
    Records *records = malloc(sizeof *records);
    if (!records)
        return NULL;
    memset(records, 0, offsetof(Records, bytes));
    if (make_cipher(&records->requests, keys, !serves) && make_cipher(&records->answers, keys + AEAD_KEY, serves))
        return records;
    free_records(records);
    return NULL;
}

/* ---- prefill */

/* Seal the next record of a piece behind what is to leave already: `size` bytes from `pos` on. */
static int seal_bytes(Records *records, const Part *part, const char *base, uint64_t pos, size_t size)
{
    unsigned char *to = records->bytes + records->size;
    uint64_t nth = pos / part->size, skip = pos % part->size;
    int good = begin_record(&records->answers);
    for (size_t at = 0, some; at < size && good; at += some, nth++, skip = 0) {
        const unsigned char *from = (const unsigned char *)base + nth * part->step + skip;
        some = part->size - skip < size - at ? (size_t)(part->size - skip) : size - at;
        if (part->size < SMALL)
            memcpy(to + at, from, some);
        else
            good = add_to_record(&records->answers, to + at, from, some);
    }
    if (part->size < SMALL)
        good = good && add_to_record(&records->answers, to, to, size);
    records->size += size + TAG;
    return good && end_record(&records->answers, to + size);
}

static int seal_header(Records *records, const unsigned char *header)
{
    memcpy(records->bytes, header, HEADER);
    records->size = HEADER + TAG;
    records->at = 0;
    return pass_record(&records->answers, records->bytes, HEADER);
}

/* ---- decode */

/* Open a whole record of a piece, where it lies. */
static int open_bytes(Records *records, size_t size)
{
    records->at = 0;
    return pass_record(&records->answers, records->bytes, size);
}

/* Bring bytes that were opened to their rows, behind those that are there. What has a sum and lies on cache lines is summed
 * up and stored past the caches in one pass, over as many records as it takes: these begin at multiples of a line. */
static void place_bytes(Records *records, Scatter *rows, size_t bytes)
{
    const unsigned char *from = records->bytes;
    for (size_t some; bytes; bytes -= some, from += some) {
        size_t pos = rows->done, block = pos / rows->size, skip = pos % rows->size, within = skip % rows->part;
        size_t piece = block * rows->per_block + skip / rows->part, begin = pos - within, end = piece_end(rows, piece);
        unsigned char *to = (unsigned char *)rows->memory.buf + rows->at[block] + skip;
        int lines = rows->cover && carry_stripes && end - begin >= ACROSS &&
                    (((uintptr_t)to - within) | begin | end) % STRIPE == 0;
        some = end - pos < bytes ? end - pos : bytes;
        if (!within)
            records->lanes = (Lanes){0};
        if (lines)
            carry_stripes(&records->lanes, from, some / STRIPE, to);
        else if (rows->cover)
            memcpy(to, from, some);
        else
            carry(to, from, some, 0);
        rows->done += some;
        if (!rows->cover || rows->done < end)
            continue;
        if (lines)
            rows->sum[piece] = total_of(&records->lanes, (end - begin) / STRIPE, NULL, 0);
        else
            sum_piece(rows, piece);
        rows->summed = piece + 1;
    }
    fence();
}

#endif
