/* Decode's end of a stripe: pieces are asked for, and what comes goes to its rows. */
#ifndef XPYD_STRIPE_FETCH_H
#define XPYD_STRIPE_FETCH_H

#include "_stripe.h"

static uint64_t under_way(const Stripe *s)
{
    return s->asked - s->answered;
}

/* Whether no other stripe of the session has less under way, and room for more; one that is slow holds up nobody. */
static int has_least(const Stripe *s)
{
    for (const Stripe *t = s->session->stripes; t; t = t->sibling)
        if (t->flying < s->flying && under_way(t) < UNDER_WAY && (!under_way(t) || s->session->landed - t->seen < SLOW))
            return 0;
    return 1;
}

static void write_request(Stripe *s, Flight *flight)
{
    unsigned char *to = s->requests + s->asked % UNDER_WAY * s->request_size;
    const Part *part = flight->part;
    uint32_t serial = (uint32_t)s->asked;
    memcpy(to, &serial, 4);
    memcpy(to + 4, flight->order->key, KEY);
    memcpy(to + 4 + KEY, &part->offset, 8);
    memcpy(to + 12 + KEY, &part->size, 8);
    memcpy(to + 20 + KEY, &part->step, 8);
    memcpy(to + 28 + KEY, &part->count, 4);
    memset(to + 32 + KEY, 0, 4);
}

/* Ask for pieces that this stripe may take now. */
static void ask(Stripe *s)
{
    Session *session = s->session;
    lock(s->pool);
    if (!under_way(s))
        s->seen = session->landed;
    for (Order *order; (order = session->first) && under_way(s) < UNDER_WAY;) {
        if (wasted(order) || (order->gate && gate_closed(order->gate))) {
            waste(order);
            answer_if_over(s->pool, order);
            continue;
        }
        Flight *flight = &s->flights[s->asked % UNDER_WAY];
        *flight = (Flight){order, &order->part[order->asked]};
        if ((s->flying && s->flying + bytes_of(flight->part) > FLYING_MOST) || !has_least(s))
            break;
        write_request(s, flight);
        s->flying += bytes_of(flight->part);
        s->asked++;
        if (++order->asked == order->parts)
            unqueue(order);
    }
    unlock(s->pool);
}

/* Requests leave. */
static void say(Stripe *s)
{
    struct iovec from[2];
    for (Records *r = s->records; r && r->sealed < s->asked; r->sealed++)
        if (!pass_record(&r->requests, s->requests + r->sealed % UNDER_WAY * s->request_size, REQUEST)) {
            fail_cipher(s);
            return;
        }
    while (s->moved < s->asked * s->request_size) {
        size_t sent = send_once(s, from, ring(s, s->moved, s->asked * s->request_size - s->moved, from), 0);
        if (!sent)
            return;
        s->moved += sent;
    }
}

/* Begin to write into the rows of an order; 0: nobody wants it any more. */
static int enter_rows(const Order *order)
{
    return !wasted(order) && (!order->gate || enter_gate(order->gate));
}

static void leave_rows(const Order *order)
{
    if (order->gate)
        leave_gate(order->gate);
}

/* Nothing more of an order is wanted, or to be had. */
static void give_up(Stripe *s, Order *order)
{
    lock(s->pool);
    waste(order);
    unlock(s->pool);
}

/* The piece that was asked for first has ended; the next header has bytes already, or none. */
static void land(Stripe *s)
{
    Flight *flight = &s->flights[s->answered % UNDER_WAY];
    lock(s->pool);
    s->flying -= bytes_of(flight->part);
    s->answered++;
    s->seen = ++s->session->landed;
    settle(s->pool, flight->order);
    unlock(s->pool);
    s->coming = 0;
    s->wasted = 0;
}

/* A whole header: of the piece that is next, or the peer lies. */
static void read_header(Stripe *s)
{
    s->in_header = 0;
    if (s->records && !pass_record(&s->records->answers, s->header, HEADER)) {
        fail(s, TAMPERED);
        return;
    }
    uint32_t state = u32_at(s->header + 4);
    uint64_t size = u64_at(s->header + 8);
    if (!under_way(s) || u32_at(s->header) != (uint32_t)s->answered || s->moved < (s->answered + 1) * s->request_size) {
        fail(s, LIED);
        return;
    }
    Flight *flight = &s->flights[s->answered % UNDER_WAY];
    if (state == NOT_THERE && !size) {
        give_up(s, flight->order);
        land(s);
    } else if (state == THERE && size == bytes_of(flight->part))
        s->coming = 1;
    else
        fail(s, LIED);
}

/* Receive once: of the piece that is coming, and of the header behind it where `bytes` is all that is missing. */
static ssize_t receive_into(Stripe *s, struct iovec *to, size_t used, size_t bytes, uint64_t missing)
{
    if (bytes == missing)
        to[used++] = (struct iovec){s->header, s->header_size};
    ssize_t got = receive_once(s, to, used);
    if (got > 0)
        s->quiet = 0;
    if (got > 0 && (uint64_t)got > missing)
        s->in_header = (size_t)((uint64_t)got - missing);
    return got;
}

/* Bytes of a piece that nobody wants any more. What has come of it before stays as it is. */
static ssize_t pass_over(Stripe *s, const Part *part)
{
    unsigned char nowhere[64 << 10];
    uint64_t missing = bytes_of(part) - part->rows->done - s->wasted;
    size_t bytes = missing < sizeof nowhere ? (size_t)missing : sizeof nowhere;
    struct iovec to[2] = {{nowhere, bytes}};
    ssize_t got = receive_into(s, to, 1, bytes, missing);
    if (got > 0)
        s->wasted += (uint64_t)got < missing ? (uint64_t)got : missing;
    return got;
}

/* Bytes of a piece into its rows, inside the gate, until none are there, `*most` have come, or all. */
static ssize_t fill(Stripe *s, Scatter *rows, size_t *most)
{
    Hot hot = {rows->cover ? hot_memory() : NULL, rows->done};
    int hotly = through(&hot, rows);
    ssize_t got = 1;
    while (got > 0 && *most && rows->done < rows->total) {
        struct iovec to[IOV + 1];
        size_t bytes, used = 1, missing = rows->total - rows->done;
        if (hotly)
            bytes = next_hot(&hot, rows, to);
        else
            used = stretches(rows, rows->done, at_once(rows), to, IOV, &bytes);
        got = receive_into(s, to, used, bytes, missing);
        if (got <= 0)
            break;
        size_t some = (size_t)got < missing ? (size_t)got : missing;
        rows->done += some;
        spend(most, (ssize_t)some);
        if (hotly)
            cool(&hot, rows, 0);
        else
            sum_up(rows);
    }
    int code = errno;
    if (hotly)
        cool(&hot, rows, 1);
    fence();
    errno = code;
    return got;
}

/* Bytes of a record of the piece; once all of it is here and right it is brought to its rows, inside the gate. */
static ssize_t take_record(Stripe *s, Order *order, Scatter *rows)
{
    Records *records = s->records;
    uint64_t missing = rows->total - rows->done - s->wasted;
    size_t size = missing < RECORD ? (size_t)missing : RECORD, rest = size + TAG - records->at;
    struct iovec to[2] = {{records->bytes + records->at, rest}};
    ssize_t got = receive_into(s, to, 1, rest, size == missing ? rest : rest + 1);
    if (got <= 0)
        return got;
    records->at += (size_t)got < rest ? (size_t)got : rest;
    if ((size_t)got < rest)
        return got;
    if (!open_bytes(records, size)) {
        fail(s, TAMPERED);
    } else if (enter_rows(order)) {
        place_bytes(records, rows, size);
        leave_rows(order);
    } else {
        give_up(s, order);
        s->wasted += size;
    }
    return got;
}

/* What has come. */
static void take(Stripe *s)
{
    size_t most = TURN;
    while (s->why < 0 && most) {
        ssize_t got;
        if (s->coming) {
            Flight *flight = &s->flights[s->answered % UNDER_WAY];
            Order *order = flight->order;
            Scatter *rows = flight->part->rows;
            if (s->records) {
                got = take_record(s, order, rows);
                spend(&most, got);
            } else if (enter_rows(order)) {
                got = fill(s, rows, &most);
                leave_rows(order);
            } else {
                give_up(s, order);
                got = pass_over(s, flight->part);
                spend(&most, got);
            }
            if (got <= 0 && !only_now(s, got))
                return;
            if (rows->done + s->wasted == rows->total)
                land(s), ask(s), say(s);
            else if (got <= 0)
                return;
        } else {
            struct iovec to = {s->header + s->in_header, s->header_size - s->in_header};
            got = receive_once(s, &to, 1);
            if (got <= 0) {
                only_now(s, got);
                return;
            }
            s->in_header += (size_t)got;
            s->quiet = 0;
        }
        if (s->in_header == s->header_size && !s->coming) {
            read_header(s);
            if (!s->coming && s->why < 0)
                ask(s), say(s);
        }
    }
}

#endif
