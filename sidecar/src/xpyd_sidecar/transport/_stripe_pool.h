/* A pool from its begin to its end, and what has come of it as Python's lists. Called with the interpreter held. */
#ifndef XPYD_STRIPE_POOL_H
#define XPYD_STRIPE_POOL_H

#include "_stripe_threads.h"

static void free_pool(Pool *pool)
{
    for (int n = 0; n < BUCKETS; n++)
        for (Copy *copy = pool->buckets[n], *next; copy; copy = next) {
            next = copy->next;
            PyBuffer_Release(&copy->view);
            free(copy);
        }
    if (pool->event >= 0)
        close(pool->event);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool->sessions);
    free(pool);
}

/* A pool without threads; NULL, with errno. */
static Pool *make_pool(int many, int quiet)
{
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pool->many = (uint32_t)many;
    pool->quiet_most = quiet;
    pool->answered_end = &pool->answered;
    pool->ended_end = &pool->ended;
    pool->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pool->workers = calloc((size_t)many, sizeof *pool->workers);
    pool->sessions = calloc(SESSIONS_MOST, sizeof *pool->sessions);
    int code = pool->event < 0 || !pool->workers || !pool->sessions ? errno : 0;
    for (int n = 0; !code && n < many; n++)
        pool->workers[n].pool = pool;
    if (!code)
        return pool;
    free_pool(pool);
    errno = code;
    return NULL;
}

/* Orders of a session of which not all was asked for are over; under the lock. */
static void drop_queue(Pool *pool, Session *session)
{
    for (Order *order; (order = session->first);) {
        waste(order);
        answer_if_over(pool, order);
    }
}

/* End the threads and close all files; what they had is collected later. */
static void close_pool(Pool *pool)
{
    int before = __atomic_exchange_n(&pool->closing, 1, __ATOMIC_SEQ_CST);
    if (before)
        return;
    Py_BEGIN_ALLOW_THREADS
    for (uint32_t n = 0; n < pool->many; n++)
        if (pool->workers[n].running) {
            wake(&pool->workers[n]);
            pthread_join(pool->workers[n].thread, NULL);
            pool->workers[n].running = 0;
            close(pool->workers[n].epoll);
            close(pool->workers[n].wake);
        }
    Py_END_ALLOW_THREADS
    lock(pool);
    for (Session *session = pool->sessions; session < pool->sessions + SESSIONS_MOST; session++)
        drop_queue(pool, session);
    close(pool->event);
    pool->event = -1; /* what is left is collected without being told of */
    unlock(pool);
}

static int append(PyObject *list, PyObject *one)
{
    int code = one ? PyList_Append(list, one) : -1;
    Py_XDECREF(one);
    return code;
}

/* All three lists of a pool as Python's; where memory is short an exception is set, and they are gone all the same. */
static PyObject *collected(Pool *pool)
{
    PyObject *answers = PyList_New(0), *ended = PyList_New(0), *freed = PyList_New(0);
    int bad = !answers || !ended || !freed;
    uint64_t count;
    lock(pool);
    if (read(pool->event, &count, sizeof count) < 0)
        count = 0; /* nothing was told */
    Order *order = pool->answered;
    Stripe *s = pool->ended;
    Copy *copy = pool->freed;
    pool->answered = NULL;
    pool->answered_end = &pool->answered;
    pool->ended = NULL;
    pool->ended_end = &pool->ended;
    pool->freed = NULL;
    pool->told = 0;
    for (Order *one = order; one; one = one->next)
        one->session->uses--;
    for (Stripe *one = s; one; one = one->next)
        one->session->uses--;
    unlock(pool);
    for (Order *next; order; order = next) {
        next = order->next;
        bad = bad || append(answers, Py_BuildValue("(KO)", order->number, wasted(order) ? Py_False : Py_True)) < 0;
        Py_DECREF(order->held);
        Py_XDECREF((PyObject *)order->gate);
        free(order);
    }
    for (Stripe *next; s; s = next) {
        next = s->next;
        bad = bad || append(ended, Py_BuildValue("(nii)", (Py_ssize_t)(s->session - pool->sessions), s->why, s->error)) < 0;
        free(s);
    }
    for (Copy *next; copy; copy = next) {
        next = copy->next;
        bad = bad || append(freed, PyBytes_FromStringAndSize((const char *)copy->key, KEY)) < 0;
        PyBuffer_Release(&copy->view);
        free(copy);
    }
    if (!bad)
        return Py_BuildValue("(NNN)", answers, ended, freed);
    Py_XDECREF(answers);
    Py_XDECREF(ended);
    Py_XDECREF(freed);
    return NULL;
}

#endif
