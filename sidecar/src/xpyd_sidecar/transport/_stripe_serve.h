/* Prefill's end of a stripe: requests are heard, and what they ask for leaves out of copies of the store. */
#ifndef XPYD_STRIPE_SERVE_H
#define XPYD_STRIPE_SERVE_H

#include "_stripe.h"

/* Requests come, as far as there is room. */
static void hear(Stripe *s)
{
    struct iovec to[2];
    while (s->why < 0) {
        uint64_t room = ROOM - (s->moved - s->answered * s->request_size);
        if (!room)
            return;
        ssize_t got = receive_once(s, to, ring(s, s->moved, room, to));
        if (got <= 0) {
            only_now(s, got);
            return;
        }
        s->moved += (uint64_t)got;
    }
}

/* Begin to answer the next request, if it has come whole. */
static int answer(Stripe *s)
{
    unsigned char *request = s->requests + s->answered % UNDER_WAY * s->request_size;
    uint32_t serial = (uint32_t)s->answered, state = THERE;
    int lies = 0;
    if (s->moved < (s->answered + 1) * s->request_size)
        return 0;
    if (s->records && !pass_record(&s->records->requests, request, REQUEST)) {
        fail(s, TAMPERED);
        return 0;
    }
    if (u32_at(request) == serial)
        s->copy = asked_for(s->pool, request, &s->part, &lies);
    else
        lies = 1;
    if (lies) {
        fail(s, LIED);
        return 0;
    }
    if (!s->copy)
        state = NOT_THERE;
    s->left = s->copy ? bytes_of(&s->part) : 0;
    memcpy(s->header, &serial, 4);
    memcpy(s->header + 4, &state, 4);
    memcpy(s->header + 8, &s->left, 8);
    s->in_header = 0;
    s->coming = 1;
    s->answered++;
    return 1;
}

/* Memory of what is to leave next. */
static size_t leaving(Stripe *s, struct iovec *from, size_t most)
{
    size_t used = 0;
    if (s->in_header < HEADER)
        from[used++] = (struct iovec){s->header + s->in_header, HEADER - s->in_header};
    if (!s->copy)
        return used;
    const Part *part = &s->part;
    uint64_t pos = bytes_of(part) - s->left, nth = pos / part->size, skip = pos % part->size;
    char *base = (char *)s->copy->view.buf + (part->offset - s->copy->offset);
    for (; nth < part->count && used < IOV && most; nth++, skip = 0) {
        size_t some = part->size - skip < most ? (size_t)(part->size - skip) : most;
        from[used++] = (struct iovec){base + nth * part->step + skip, some};
        most -= some;
    }
    return used;
}

static void drop_copy(Stripe *s)
{
    if (!s->copy)
        return;
    lock(s->pool);
    let_go(s->pool, s->copy);
    unlock(s->pool);
    s->copy = NULL;
}

/* Records of what is to leave next, sealed where none waits; 0: they cannot be. What was sealed stays until it has left. */
static size_t leaving_records(Stripe *s, struct iovec *from)
{
    Records *r = s->records;
    if (r->at == r->size) {
        const Part *part = &s->part;
        size_t size = s->left < RECORD ? (size_t)s->left : RECORD;
        int good = 1, head = s->in_header < HEADER;
        r->size = r->at = 0;
        if (head)
            good = seal_header(r, s->header);
        if (good && size)
            good = seal_bytes(r, part, (char *)s->copy->view.buf + (part->offset - s->copy->offset),
                              bytes_of(part) - s->left, size);
        if (!good)
            return 0;
        s->in_header = HEADER;
        s->left -= size;
    }
    from[0] = (struct iovec){r->bytes + r->at, r->size - r->at};
    return 1;
}

/* So many bytes have left. */
static void has_left(Stripe *s, size_t sent)
{
    size_t head = HEADER - s->in_header, some = sent < head ? sent : head;
    if (s->records) {
        s->records->at += sent;
        return;
    }
    s->in_header += some;
    s->left -= sent - some;
}

/* Whether all of an answer has left. */
static int answered_whole(const Stripe *s)
{
    return s->in_header == HEADER && !s->left && (!s->records || s->records->at == s->records->size);
}

/* What was asked for leaves. */
static void serve(Stripe *s)
{
    size_t most = TURN;
    struct iovec from[IOV + 1];
    hear(s);
    while (s->why < 0 && most && (s->coming || answer(s))) {
        size_t used = s->records ? leaving_records(s, from) : leaving(s, from, most);
        if (!used) {
            fail_cipher(s);
            return;
        }
        /* a record alone would end with a short segment; of more to come the next one follows at once */
        size_t sent = send_once(s, from, used, s->records && s->left ? MSG_MORE : 0);
        if (!sent)
            return;
        has_left(s, sent);
        spend(&most, (ssize_t)(sent < PRICE ? PRICE : sent));
        if (answered_whole(s)) {
            drop_copy(s);
            s->coming = 0;
            hear(s);
        }
    }
}

#endif
