/* What threads and Python share of stripes: sessions, orders, copies, and who is told of what has ended. No sockets here.
 *
 *     Pool      of a rank's one direction: threads, sessions, copies. All but what is a thread's own is under its lock,
 *               which is held for no call but of memory
 *     Session   its stripes, and orders of which not every piece was asked for
 *     Order     pieces, where they go, and inside which gate; answered once
 *     Copy      bytes of the store that may be asked for; freed when it is taken and nobody sends of it
 *
 * What comes of threads lies in three lists until Python collects it, and an eventfd says when one of them is no longer empty.
 * An entry is what it tells of, so a thread never allocates.
 */
#ifndef XPYD_STRIPES_H
#define XPYD_STRIPES_H

#define WORKERS_MOST 8
#define SESSIONS_MOST 4096
#define BUCKETS 4096 /* of copies */
#define UNDER_WAY 64 /* requests of a stripe */
#define FLYING_MOST ((uint64_t)8 << 20) /* bytes of them, if they are more than one */
#define COUNT_MOST ((uint32_t)1 << 16) /* stretches of a request */
#define SLOW 16 /* pieces that others of a session land meanwhile: who has landed none is not waited for */

#define KEY 28     /* of a copy: transfer (16), attempt, generation, number of the manifest */
#define REQUEST 64 /* serial u32 | key | offset u64 | size u64 | step u64 | count u32 | 0 u32 */
#define HEADER 16  /* serial u32 | state u32 | bytes u64 */
enum { THERE = 0, NOT_THERE = 1 };

/* Why a stripe has ended. */
enum { ASKED = 0, LEFT, FAILED, SILENT, LIED, TAMPERED };

typedef struct Session Session;
typedef struct Stripe Stripe;
typedef struct Worker Worker;
typedef struct Pool Pool;

typedef struct {
    Scatter *rows;
    uint64_t offset, size, step; /* of prefill's store */
    uint32_t count;
    uint32_t zero;
} Part;

typedef struct Order {
    struct Order *next; /* of its session's queue, or of those that are answered */
    Session *session;
    PyObject *held; /* the rows */
    Gate *gate;     /* NULL: there is none */
    uint64_t number;
    uint32_t parts, asked, settled;
    int queued;
    int wasted; /* atomic: what comes of it is passed over */
    unsigned char key[KEY];
    Part part[];
} Order;

typedef struct Copy {
    struct Copy *next; /* of its bucket, or of those that are freed */
    Py_buffer view;
    uint64_t offset; /* of its first byte in the store */
    uint32_t sending;
    int taken;
    unsigned char key[KEY];
} Copy;

struct Session {
    Stripe *stripes;
    Order *first, *last;
    uint64_t landed; /* pieces */
    uint32_t uses; /* stripes and orders that Python has not collected, and whether it has not ended it */
    int ended;
};

struct Pool {
    pthread_mutex_t lock;
    int event; /* eventfd */
    int told;  /* it says so already */
    int closing;
    int quiet_most; /* looks at a stripe in which it moves no byte */
    uint32_t many, begun;
    uint32_t stripes; /* that have not ended */
    Worker *workers;
    Session *sessions;
    Order *answered, **answered_end;
    Stripe *ended, **ended_end;
    Copy *freed;
    Copy *buckets[BUCKETS];
};

static void lock(Pool *pool)
{
    pthread_mutex_lock(&pool->lock);
}

static void unlock(Pool *pool)
{
    pthread_mutex_unlock(&pool->lock);
}

/* Something is to be collected. */
static void tell(Pool *pool)
{
    uint64_t one = 1;
    if (!pool->told && write(pool->event, &one, sizeof one) == sizeof one)
        pool->told = 1;
}

/* Of UINT32 and UINT64, little endian, wherever they lie. */
static uint32_t u32_at(const unsigned char *from)
{
    uint32_t found;
    memcpy(&found, from, sizeof found);
    return found;
}

static uint64_t u64_at(const unsigned char *from)
{
    uint64_t found;
    memcpy(&found, from, sizeof found);
    return found;
}

/* ---- orders; under the lock */

static uint64_t bytes_of(const Part *part)
{
    return part->size * part->count;
}

static void unqueue(Order *order)
{
    Session *session = order->session;
    Order **at = &session->first, *before = NULL;
    if (!order->queued)
        return;
    for (; *at != order; at = &(*at)->next)
        before = *at;
    *at = order->next;
    if (session->last == order)
        session->last = before;
    order->queued = 0;
    order->next = NULL;
}

/* An order of which nothing more is asked for, and all that was has ended, is answered. */
static void answer_if_over(Pool *pool, Order *order)
{
    if (order->queued || order->settled != order->asked)
        return;
    order->next = NULL;
    *pool->answered_end = order;
    pool->answered_end = &order->next;
    tell(pool);
}

/* What comes of an order from here on means nothing, and no more of it is asked for. */
static void waste(Order *order)
{
    __atomic_store_n(&order->wasted, 1, __ATOMIC_RELAXED);
    unqueue(order);
}

static int wasted(const Order *order)
{
    return __atomic_load_n(&order->wasted, __ATOMIC_RELAXED);
}

/* A piece that was asked for is here, or will not come. */
static void settle(Pool *pool, Order *order)
{
    order->settled++;
    answer_if_over(pool, order);
}

/* ---- copies; under the lock */

static Copy **bucket_of(Pool *pool, const unsigned char *key)
{
    uint64_t mixed = 0xcbf29ce484222325u;
    for (int n = 0; n < KEY; n++)
        mixed = (mixed ^ key[n]) * 0x100000001b3u;
    return &pool->buckets[(mixed ^ mixed >> 32) % BUCKETS];
}

/* Where the copy of this key hangs, or would. */
static Copy **find_copy(Pool *pool, const unsigned char *key)
{
    Copy **at = bucket_of(pool, key);
    while (*at && memcmp((*at)->key, key, KEY))
        at = &(*at)->next;
    return at;
}

/* One who sent of a copy needs it no more. */
static void let_go(Pool *pool, Copy *copy)
{
    if (--copy->sending || !copy->taken)
        return;
    copy->next = pool->freed;
    pool->freed = copy;
    tell(pool);
}

/* The copy that a request names, held; NULL: it is not there. `*lies`: no honest decode asks for that. */
static Copy *asked_for(Pool *pool, const unsigned char *request, Part *part, int *lies)
{
    const unsigned char *at = request + 4 + KEY;
    *part = (Part){NULL, u64_at(at), u64_at(at + 8), u64_at(at + 16), u32_at(at + 24), u32_at(at + 28)};
    *lies = !part->size || !part->count || part->count > COUNT_MOST || part->zero ||
            (part->count > 1 ? part->step < part->size : part->step != 0);
    if (*lies)
        return NULL;
    lock(pool);
    Copy *copy = *find_copy(pool, request + 4);
    if (copy) {
        uint64_t room = (uint64_t)copy->view.len, begin = part->offset - copy->offset;
        *lies = part->size > room || begin > room - part->size || /* what lies before it wraps around */
                (part->count > 1 && part->step > (room - part->size - begin) / (part->count - 1));
        copy = *lies ? NULL : copy;
    }
    if (copy)
        copy->sending++;
    unlock(pool);
    return copy;
}

#endif
