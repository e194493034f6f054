/* Stripes of the link tcp: threads that move bytes between sockets and memory, and never need the interpreter.
 *
 *     Gate()                                     whether bytes may still be written into blocks (`_gate.h`)
 *     Pool(threads, quiet)                       of one direction of a rank; quiet: looks of 0.1 s at a stripe that moves no byte
 *     Pool.open() → session                      a number for what its stripes and orders have in common
 *     Pool.attach(session, fd, serves, keys)     a connected socket, taken over; serves: prefill's end. keys: b"" where KV is in
 *                                                clear, else 32 bytes for what decode says and 32 for what prefill does
 *     Pool.order(session, number, key, parts, rows, gate)
 *                                                decode: bring pieces; parts: offset, size, step u64, count, 0 u32 of each
 *     Pool.end(session)                          all of it
 *     Pool.add(key, view, offset)                prefill: may be asked for from now on
 *     Pool.take(key) → bool                      … no more; whether nobody sends of it
 *     Pool.collect() → answers, ended, freed     what has come of all that since the last time; fileno() is readable then
 *     Pool.close()                               end the threads, and all that is under way
 *     open_libcrypto(name) → bool                take a library to encrypt with; whether there is one now
 *
 * Belongs here: Python's side. What is shared is in `_stripes.h`, pools in `_stripe_pool.h`, threads in `_stripe_threads.h`,
 * sockets in `_stripe.h` and its two ends, encryption in `_records.h`.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "_gate.h"
#include "_receive.h"
#include "_stripe_pool.h"

#define REVISION 2 /* the same as in gates.py: one that was built for other files is not loaded */
#define PART 32    /* bytes of a piece's place in the store */

typedef struct {
    PyObject_HEAD
    Pool *pool;
} PoolObject;

static PyTypeObject *rows_type; /* Scatter, of `_moves` */

static PyObject *wrong(const char *what)
{
    PyErr_SetString(PyExc_ValueError, what);
    return NULL;
}

/* A session that Python has not ended; NULL: there is none of this number, or the pool is closed. */
static Session *session_of(Pool *pool, Py_ssize_t number)
{
    if (over(&pool->workers[0]))
        return (Session *)wrong("the pool is closed");
    if (number < 0 || number >= SESSIONS_MOST || !pool->sessions[number].uses || pool->sessions[number].ended)
        return (Session *)wrong("no such session");
    return &pool->sessions[number];
}

static PyObject *pool_open(PoolObject *self, PyObject *unused)
{
    Pool *pool = self->pool;
    (void)unused;
    lock(pool);
    Py_ssize_t number = 0;
    while (number < SESSIONS_MOST && pool->sessions[number].uses)
        number++;
    if (number < SESSIONS_MOST)
        pool->sessions[number] = (Session){.uses = 1};
    unlock(pool);
    if (number == SESSIONS_MOST)
        return wrong("too many sessions");
    return PyLong_FromSsize_t(number);
}

static PyObject *pool_attach(PoolObject *self, PyObject *args)
{
    Pool *pool = self->pool;
    Py_ssize_t number, size;
    int fd, serves;
    const char *keys;
    if (!PyArg_ParseTuple(args, "nipy#", &number, &fd, &serves, &keys, &size))
        return NULL;
    Session *session = session_of(pool, number);
    if (!session)
        return NULL;
    if (size && (size != KEYS || !evp.library))
        return wrong("keys of another size, or no library to encrypt with");
    Stripe *s = calloc(1, sizeof *s);
    if (!s)
        return PyErr_NoMemory();
    *s = (Stripe){.pool = pool, .session = session, .fd = fd, .serves = serves, .why = -1};
    if (!init_stripe(s, size ? (const unsigned char *)keys : NULL)) {
        free(s);
        return PyErr_NoMemory();
    }
    lock(pool);
    Worker *worker = NULL;
    int code = 0;
    for (uint32_t tried = 0; !worker && tried < pool->many; tried++) { /* where one cannot begin, another has more to do */
        uint32_t nth = (pool->begun + tried) % pool->many;
        int why = start_worker(&pool->workers[nth], nth);
        worker = why ? NULL : &pool->workers[nth];
        code = worker ? 0 : code ? code : why;
    }
    if (worker) {
        s->worker = worker;
        s->sibling = session->stripes;
        s->next = worker->incoming;
        session->stripes = worker->incoming = s;
        session->uses++;
        pool->begun++;
        pool->stripes++;
    }
    unlock(pool);
    if (code) {
        free_records(s->records);
        free(s);
        errno = code;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    wake(worker);
    Py_RETURN_NONE;
}

/* What an order is made of, checked; 0: an exception is set. */
static int read_parts(Order *order, const char *parts, PyObject *rows)
{
    for (uint32_t n = 0; n < order->parts; n++) {
        PyObject *one = PyTuple_GetItem(rows, (Py_ssize_t)n);
        const unsigned char *at = (const unsigned char *)parts + PART * (size_t)n;
        if (!one || !PyObject_TypeCheck(one, rows_type)) {
            PyErr_SetString(PyExc_TypeError, "rows are Scatters");
            return 0;
        }
        Scatter *to = (Scatter *)one;
        Part *part = &order->part[n];
        *part = (Part){to, u64_at(at), u64_at(at + 8), u64_at(at + 16), u32_at(at + 24), u32_at(at + 28)};
        if (to->done || !part->count || part->zero || part->size != to->total / part->count || bytes_of(part) != to->total) {
            wrong("rows that are not what is asked for");
            return 0;
        }
    }
    return 1;
}

static PyObject *pool_order(PoolObject *self, PyObject *args)
{
    Pool *pool = self->pool;
    Py_ssize_t session_number, key_size, size;
    unsigned long long number;
    const char *key, *parts;
    PyObject *rows, *gate;
    if (!PyArg_ParseTuple(args, "nKy#y#O!O", &session_number, &number, &key, &key_size, &parts, &size, &PyTuple_Type, &rows,
                          &gate))
        return NULL;
    Session *session = session_of(pool, session_number);
    if (!session)
        return NULL;
    if (key_size != KEY || size < PART || size % PART || PyTuple_Size(rows) != size / PART)
        return wrong("a key of another size, or other rows than parts");
    if (gate != Py_None && !PyObject_TypeCheck(gate, gate_type)) {
        PyErr_SetString(PyExc_TypeError, "no gate that threads can enter");
        return NULL;
    }
    Order *order = calloc(1, sizeof *order + (size_t)(size / PART) * sizeof *order->part);
    if (!order)
        return PyErr_NoMemory();
    order->session = session;
    order->number = number;
    order->parts = (uint32_t)(size / PART);
    memcpy(order->key, key, KEY);
    if (!read_parts(order, parts, rows)) {
        free(order);
        return NULL;
    }
    Py_INCREF(rows);
    order->held = rows;
    if (gate != Py_None) {
        Py_INCREF(gate);
        order->gate = (Gate *)gate;
    }
    uint64_t asleep = 0;
    lock(pool);
    order->queued = 1;
    *(session->last ? &session->last->next : &session->first) = order;
    session->last = order;
    session->uses++;
    for (Stripe *s = session->stripes; s; s = s->sibling)
        asleep |= (uint64_t)1 << (s->worker - pool->workers);
    unlock(pool);
    for (uint32_t n = 0; n < pool->many; n++)
        if (asleep >> n & 1)
            wake(&pool->workers[n]);
    Py_RETURN_NONE;
}

static PyObject *pool_end(PoolObject *self, PyObject *args)
{
    Pool *pool = self->pool;
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "n", &number))
        return NULL;
    if (over(&pool->workers[0]))
        Py_RETURN_NONE; /* it has ended with all others */
    Session *session = session_of(pool, number);
    if (!session)
        return NULL;
    lock(pool);
    session->ended = 1;
    session->uses--;
    drop_queue(pool, session);
    unlock(pool);
    for (uint32_t n = 0; n < pool->many; n++)
        wake(&pool->workers[n]);
    Py_RETURN_NONE;
}

static PyObject *pool_add(PoolObject *self, PyObject *args)
{
    Pool *pool = self->pool;
    PyObject *view;
    const char *key;
    Py_ssize_t size;
    unsigned long long offset;
    if (!PyArg_ParseTuple(args, "y#OK", &key, &size, &view, &offset))
        return NULL;
    if (size != KEY)
        return wrong("a key of another size");
    Copy *copy = calloc(1, sizeof *copy);
    if (!copy)
        return PyErr_NoMemory();
    if (PyObject_GetBuffer(view, &copy->view, PyBUF_SIMPLE) < 0) {
        free(copy);
        return NULL;
    }
    copy->offset = offset;
    memcpy(copy->key, key, KEY);
    lock(pool);
    Copy **at = find_copy(pool, copy->key);
    int there = *at != NULL;
    if (!there)
        *at = copy;
    unlock(pool);
    if (there) {
        PyBuffer_Release(&copy->view);
        free(copy);
        return wrong("there is a copy of this key");
    }
    Py_RETURN_NONE;
}

static PyObject *pool_take(PoolObject *self, PyObject *args)
{
    Pool *pool = self->pool;
    const char *key;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "y#", &key, &size))
        return NULL;
    if (size != KEY)
        return wrong("a key of another size");
    lock(pool);
    Copy **at = find_copy(pool, (const unsigned char *)key), *copy = *at;
    int free_now = copy && !copy->sending;
    if (copy) {
        *at = copy->next;
        copy->taken = 1;
    }
    unlock(pool);
    if (!copy)
        return wrong("there is no copy of this key");
    if (free_now) {
        PyBuffer_Release(&copy->view);
        free(copy);
    }
    return PyBool_FromLong(free_now);
}

static PyObject *pool_collect(PoolObject *self, PyObject *unused)
{
    (void)unused;
    return collected(self->pool);
}

static PyObject *pool_fileno(PoolObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(self->pool->event);
}

static PyObject *pool_close(PoolObject *self, PyObject *unused)
{
    (void)unused;
    close_pool(self->pool);
    Py_RETURN_NONE;
}

static void pool_free(PoolObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->pool) {
        close_pool(self->pool);
        PyObject *rest = collected(self->pool);
        if (!rest)
            PyErr_Clear(); /* of memory; nobody waits for it */
        Py_XDECREF(rest);
        free_pool(self->pool);
    }
    freefunc give = (freefunc)PyType_GetSlot(type, Py_tp_free);
    give(self);
    Py_DECREF(type);
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int many, quiet;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "ii", &many, &quiet))
        return NULL;
    if (many < 1 || many > WORKERS_MOST || quiet < 1)
        return wrong("no threads, too many, or no patience");
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PoolObject *self = (PoolObject *)make(type, 0);
    if (!self)
        return NULL;
    self->pool = make_pool(many, quiet);
    if (self->pool)
        return (PyObject *)self;
    PyErr_SetFromErrno(PyExc_OSError);
    Py_DECREF(self);
    return NULL;
}

static PyObject *pool_stripes(PoolObject *self, void *unused)
{
    (void)unused;
    lock(self->pool);
    uint32_t found = self->pool->stripes;
    unlock(self->pool);
    return PyLong_FromUnsignedLong(found);
}

static PyMethodDef pool_methods[] = {
    {"open", (PyCFunction)pool_open, METH_NOARGS, NULL},       {"attach", (PyCFunction)pool_attach, METH_VARARGS, NULL},
    {"order", (PyCFunction)pool_order, METH_VARARGS, NULL},    {"end", (PyCFunction)pool_end, METH_VARARGS, NULL},
    {"add", (PyCFunction)pool_add, METH_VARARGS, NULL},        {"take", (PyCFunction)pool_take, METH_VARARGS, NULL},
    {"collect", (PyCFunction)pool_collect, METH_NOARGS, NULL}, {"fileno", (PyCFunction)pool_fileno, METH_NOARGS, NULL},
    {"close", (PyCFunction)pool_close, METH_NOARGS, NULL},     {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_fields[] = {{"stripes", (getter)pool_stripes, NULL, NULL, NULL}, {0}};

static PyType_Slot pool_slots[] = {{Py_tp_new, pool_new},         {Py_tp_dealloc, pool_free}, {Py_tp_methods, pool_methods},
                                   {Py_tp_getset, pool_fields}, {0, NULL}};

static PyType_Spec pool_spec = {"xpyd_sidecar.transport._stripes.Pool", sizeof(PoolObject), 0, Py_TPFLAGS_DEFAULT, pool_slots};

static PyObject *take_library(PyObject *unused, PyObject *args)
{
    const char *name;
    (void)unused;
    return PyArg_ParseTuple(args, "s", &name) ? PyBool_FromLong(open_libcrypto(name)) : NULL;
}

static PyMethodDef functions[] = {{"open_libcrypto", take_library, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_stripes", NULL, -1, functions, NULL, NULL, NULL, NULL};

/* What `_moves` calls a Scatter, if it was built of the same file as this; NULL: an exception is set. */
static PyTypeObject *find_rows(void)
{
    PyObject *moves = PyImport_ImportModule("xpyd_sidecar.transport._moves");
    PyObject *found = moves ? PyObject_GetAttrString(moves, "Scatter") : NULL;
    PyObject *size = found ? PyObject_GetAttrString(found, "__basicsize__") : NULL;
    int same = size && PyLong_AsSsize_t(size) == (Py_ssize_t)sizeof(Scatter);
    Py_XDECREF(moves);
    Py_XDECREF(size);
    if (size && !same)
        PyErr_SetString(PyExc_ImportError, "the loops were built for other rows");
    if (same)
        return (PyTypeObject *)found;
    Py_XDECREF(found);
    return NULL;
}

PyMODINIT_FUNC PyInit__stripes(void)
{
    choose_sums();
    if (pthread_key_create(&hot_key, free))
        return PyErr_NoMemory();
    PyObject *made = PyModule_Create(&module);
    rows_type = made ? find_rows() : NULL;
    gate_type = rows_type ? (PyTypeObject *)PyType_FromSpec(&gate_spec) : NULL;
    PyObject *pool_type = gate_type ? PyType_FromSpec(&pool_spec) : NULL;
    if (!pool_type || PyModule_AddObjectRef(made, "Gate", (PyObject *)gate_type) < 0 ||
        PyModule_AddObjectRef(made, "Pool", pool_type) < 0 || PyModule_AddIntConstant(made, "REVISION", REVISION) < 0) {
        Py_XDECREF(pool_type);
        Py_XDECREF(made);
        return NULL;
    }
    Py_DECREF(pool_type);
    return made;
}
