/* Threads that own stripes: each waits for all of its sockets at once, and for a word of others (`wake`).
 *
 * A thread begins with the first stripe that it is given and ends with its pool. It knows no Python object but by address:
 * what these are stays until Python has collected what comes of them.
 */
#ifndef XPYD_STRIPE_THREADS_H
#define XPYD_STRIPE_THREADS_H

#include "_stripe_fetch.h"
#include "_stripe_serve.h"

#define READY 64
#define LOOK_MS 100 /* how often silence is looked for */

struct Worker {
    Pool *pool;
    pthread_t thread;
    int running, epoll, wake;
    Stripe *incoming; /* under the lock */
    Stripe *stripes;
    size_t owing; /* stripes that owe or are owed something */
    int64_t look; /* when, in milliseconds */
};

/* ---- a stripe of either end */

/* Whether bytes are to leave (of requests that were heard), or to come (for those that were said). */
static int owes(const Stripe *s)
{
    return s->serves ? s->coming || s->moved >= (s->answered + 1) * s->request_size : under_way(s) > 0;
}

/* What it may do now. */
static void turn(Stripe *s)
{
    if (s->serves)
        serve(s);
    else
        ask(s), say(s), take(s);
}

/* What epoll is to look for. */
static uint32_t wanted(const Stripe *s)
{
    if (s->serves)
        return (owes(s) ? EPOLLOUT : 0) | (s->moved - s->answered * s->request_size < ROOM ? EPOLLIN : 0);
    return EPOLLIN | (s->moved < s->asked * s->request_size ? EPOLLOUT : 0);
}

/* Let go of all that it had under way; under the lock. */
static void abandon(Stripe *s)
{
    for (; under_way(s) && !s->serves; s->answered++) {
        Order *order = s->flights[s->answered % UNDER_WAY].order;
        waste(order);
        settle(s->pool, order);
    }
    if (s->copy)
        let_go(s->pool, s->copy);
    s->copy = NULL;
    s->flying = 0;
    Stripe **at = &s->session->stripes;
    while (*at != s)
        at = &(*at)->sibling;
    *at = s->sibling;
}

/* ---- a thread */

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void wake(const Worker *worker)
{
    uint64_t one = 1;
    while (worker->running && write(worker->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* The stripe has ended: Python hears of it, and of all that it had under way. */
static void end_stripe(Worker *worker, Stripe *s)
{
    Pool *pool = worker->pool;
    Stripe **at = &worker->stripes;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    worker->owing -= (size_t)s->owes;
    int fd = s->fd;
    free_records(s->records);
    s->records = NULL;
    lock(pool);
    abandon(s);
    pool->stripes--;
    s->next = NULL;
    *pool->ended_end = s; /* before the peer notices, and other stripes of the session end of that */
    pool->ended_end = &s->next;
    tell(pool);
    unlock(pool);
    close(fd); /* it leaves epoll, too; the stripe is Python's */
}

/* After its turn: end it, or say what it waits for. */
static void settle_stripe(Worker *worker, Stripe *s)
{
    if (s->why < 0) {
        struct epoll_event event = {.events = wanted(s), .data.ptr = s};
        if ((int)event.events != s->watched && epoll_ctl(worker->epoll, EPOLL_CTL_MOD, s->fd, &event) < 0)
            fail(s, FAILED);
        s->watched = (int)event.events;
        int now = owes(s);
        if (now && !s->owes)
            s->quiet = 0;
        worker->owing += (size_t)now - (size_t)s->owes;
        s->owes = now;
    }
    if (s->why >= 0)
        end_stripe(worker, s);
}

static void adopt(Worker *worker)
{
    lock(worker->pool);
    Stripe *s = worker->incoming;
    worker->incoming = NULL;
    unlock(worker->pool);
    for (Stripe *next; s; s = next) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
        next = s->next;
        s->next = worker->stripes;
        worker->stripes = s;
        s->watched = EPOLLIN;
        if (epoll_ctl(worker->epoll, EPOLL_CTL_ADD, s->fd, &event) < 0)
            fail(s, FAILED);
    }
}

/* Somebody has said that there is something new: stripes, orders, or sessions that are to end. */
static void look_around(Worker *worker)
{
    uint64_t count;
    if (read(worker->wake, &count, sizeof count) < 0)
        return;
    adopt(worker);
    for (Stripe *s = worker->stripes, *next; s; s = next) {
        next = s->next;
        lock(worker->pool);
        int ended = s->session->ended, ordered = s->session->first != NULL;
        unlock(worker->pool);
        if (ended)
            fail(s, ASKED);
        else if (ordered && s->why < 0)
            turn(s);
        settle_stripe(worker, s);
    }
}

/* Stripes that owe or are owed something and have moved no byte for so many looks have ended. A thread that was held up
 * itself blames nobody: it looks once, after it has served what was ready. */
static void look_for_silence(Worker *worker)
{
    int64_t now = now_ms();
    if (now < worker->look)
        return;
    worker->look = now + LOOK_MS;
    for (Stripe *s = worker->stripes, *next; s; s = next) {
        next = s->next;
        if (s->owes && ++s->quiet > worker->pool->quiet_most) {
            fail(s, SILENT);
            settle_stripe(worker, s);
        }
    }
}

static int over(const Worker *worker)
{
    return __atomic_load_n(&worker->pool->closing, __ATOMIC_SEQ_CST);
}

static void *work(void *argument)
{
    Worker *worker = argument;
    struct epoll_event ready[READY];
    while (!over(worker)) {
        int64_t left = worker->look - now_ms();
        int found = epoll_wait(worker->epoll, ready, READY, worker->owing ? left < 0 ? 0 : (int)left : -1);
        if (found < 0 && errno != EINTR)
            break; /* nothing of ours does that; all stripes end below */
        int woken = 0;
        for (int n = 0; n < found && !over(worker); n++) {
            Stripe *s = ready[n].data.ptr;
            if (!s) {
                woken = 1;
                continue;
            }
            turn(s);
            settle_stripe(worker, s);
        }
        if (woken) /* after all turns: it may end stripes that are ready, too */
            look_around(worker);
        if (worker->owing)
            look_for_silence(worker);
    }
    int why = over(worker) ? ASKED : FAILED;
    adopt(worker);
    while (worker->stripes) {
        fail(worker->stripes, why);
        end_stripe(worker, worker->stripes);
    }
    return NULL;
}

/* Begin its thread, if it has none; 0, or an error's number. Signals are for Python's threads. */
static int start_worker(Worker *worker, uint32_t number)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    sigset_t all, before;
    char name[] = "xpyd-stripe-0";
    if (worker->running)
        return 0;
    int code = 0, epoll = epoll_create1(EPOLL_CLOEXEC), word = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    worker->epoll = epoll;
    worker->wake = word;
    worker->look = now_ms() + LOOK_MS;
    if (epoll < 0 || word < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, word, &event) < 0)
        code = errno;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    code = code ? code : pthread_create(&worker->thread, NULL, work, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code) {
        close(epoll);
        close(word);
        return code;
    }
    worker->running = 1;
    name[sizeof name - 2] = (char)('0' + number);
    pthread_setname_np(worker->thread, name);
    return 0;
}

#endif
