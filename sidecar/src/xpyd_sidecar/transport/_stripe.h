/* A stripe, as the thread that owns its socket sees it: requests and bytes (`_stripes.h` has what it shares with others).
 *
 *     decode    ask ── requests ─▶ say ═══▶ hear ─▶ answer ══ header, bytes ══▶ take ─▶ rows, sums       prefill
 *
 * No call here waits. A turn moves at most TURN bytes, and then the thread's other sockets have theirs. Serials count the
 * requests of a stripe from 0 on; answers come in their order. Where KV is encrypted all of it is in records (`_records.h`).
 */
#ifndef XPYD_STRIPE_H
#define XPYD_STRIPE_H

#include "_records.h"

#define TURN ((size_t)4 << 20)
#define PRICE ((size_t)16 << 10) /* of a turn, for each call that sends, whatever it sends: answers may be empty */
#define ROOM (UNDER_WAY * (uint64_t)s->request_size)

typedef struct {
    Order *order;
    Part *part;
} Flight;

struct Stripe {
    Stripe *next, *sibling; /* of its thread, or of those that have ended; of its session */
    Pool *pool;
    Session *session;
    Worker *worker;
    int fd, serves, watched; /* watched: events of epoll */
    int why, error;
    int quiet, owes; /* looks without a byte; something is to come, or to leave */
    Records *records; /* NULL: all of it is in clear */
    size_t request_size, header_size; /* with their tags, where they have some */
    unsigned char requests[UNDER_WAY * (REQUEST + TAG)]; /* decode's own to say, or prefill's heard: a ring */
    uint64_t asked, answered;     /* requests */
    uint64_t moved;               /* bytes of requests: said, or heard */
    unsigned char header[HEADER + TAG];
    size_t in_header; /* bytes of it that have come, or left */
    int coming;       /* bytes of the piece whose header was read, or of the copy whose header leaves */
    /* decode */
    Flight flights[UNDER_WAY];
    uint64_t flying; /* bytes; under the lock */
    uint64_t seen;   /* pieces that its session had landed when it last landed one, or began anew; under the lock */
    uint64_t wasted; /* bytes of the piece that have come and are passed over */
    /* prefill */
    Copy *copy;
    Part part;
    uint64_t left; /* bytes of it that no socket has taken, or no record */
};

/* With `keys` (KEYS bytes) KV is encrypted; NULL: it is not. 0: there is no memory. */
static int init_stripe(Stripe *s, const unsigned char *keys)
{
    s->request_size = REQUEST + (keys ? TAG : 0);
    s->header_size = HEADER + (keys ? TAG : 0);
    s->records = keys ? make_records(keys, s->serves) : NULL;
    return !keys || s->records;
}

static int again(void)
{
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

/* It is over, for a reason. The thread lets go of it after its turn. */
static void fail(Stripe *s, int why)
{
    if (s->why < 0) {
        s->error = why == FAILED ? errno : 0;
        s->why = why;
    }
}

/* The library that seals what leaves did not: nothing of it may leave. */
static void fail_cipher(Stripe *s)
{
    errno = EIO;
    fail(s, FAILED);
}

/* What the socket says when it gave nothing: whether that is for now alone. */
static int only_now(Stripe *s, ssize_t got)
{
    if (got < 0 && again())
        return 1;
    fail(s, got ? FAILED : LEFT);
    return 0;
}

/* Send once, with flags of sendmsg(2), too: bytes that have left; 0: none for now, or it is over. */
static size_t send_once(Stripe *s, struct iovec *from, size_t used, int flags)
{
    struct msghdr message = {.msg_iov = from, .msg_iovlen = used};
    ssize_t sent;
    do
        sent = sendmsg(s->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
    while (sent < 0 && errno == EINTR);
    if (sent > 0) {
        s->quiet = 0;
        return (size_t)sent;
    }
    if (!again())
        fail(s, FAILED);
    return 0;
}

/* Receive once; as of recvmsg(2). */
static ssize_t receive_once(const Stripe *s, struct iovec *to, size_t used)
{
    struct msghdr message = {.msg_iov = to, .msg_iovlen = used};
    ssize_t got;
    do
        got = recvmsg(s->fd, &message, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    return got;
}

/* The stretch of the ring from `begin` on, of at most `size` bytes: one piece of memory, or two. */
static size_t ring(Stripe *s, uint64_t begin, uint64_t size, struct iovec *to)
{
    size_t at = (size_t)(begin % ROOM), first = size < ROOM - at ? (size_t)size : ROOM - at;
    to[0] = (struct iovec){s->requests + at, first};
    to[1] = (struct iovec){s->requests, (size_t)size - first};
    return size > first ? 2 : 1;
}

/* Bytes of a turn are used up. */
static void spend(size_t *most, ssize_t got)
{
    *most -= got <= 0 ? 0 : (size_t)got < *most ? (size_t)got : *most;
}

#endif
