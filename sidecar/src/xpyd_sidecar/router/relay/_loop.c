/* The waiting and reading of an event loop, compiled: what is ready is read here and given to who reads it.
 *
 *     epoll ── readable, and adopted ──▶ recv ── a leg's events ──▶ the client's socket (`_fast`)
 *         │                                └─ anything else ── when all was read ──▶ data_received, in Python
 *         └─ everything else ──▶ asyncio
 *
 * As long as nothing but events comes the interpreter is not entered: one turn follows the other. Belongs here: that. Does
 * not belong here: which descriptors are watched, timers, writing, ends and errors of connections (asyncio has them all, by
 * way of `loop`). Python's stable interface: one build serves every later version.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <string.h>
#include <sys/epoll.h>
#include <time.h>

#include "_reading.h"
#include "_socket.h"

#define REVISION 2 /* the same as in loop.py: one that was built for other files is not loaded */
#define MAX_EVENTS 256
#define READ_SIZE (256 << 10)
#define MAX_HELD 16 /* reads that wait for Python */
#define LARGE (16 << 10) /* a read that Python may be busy with for longer: it and those before it do not wait for others */
#define MAX_DESCRIPTOR (1 << 20)

typedef struct {
    PyObject *protocol; /* NULL: not adopted */
    PyObject *kept; /* read, but it was paused by another of the same turn before it heard of it */
    char leg, readable; /* readable: asyncio wants to read it, too */
} Slot;

typedef struct {
    PyObject *protocol, *data;
    int fd;
} Held;

typedef struct {
    PyObject_HEAD
    Slot *slots; /* by descriptor */
    int count;
    char *buffer;
    PyObject *failed;
    Held held[MAX_HELD];
    int helds, resumed; /* resumed: somebody for whom something is kept may be read again */
} Reads;

static const Reading *reading;
static PyObject *name_received, *name_data_received;

static Slot *slot_of(Reads *self, int fd)
{
    return fd >= 0 && fd < self->count ? &self->slots[fd] : NULL;
}

static Slot *room_for(Reads *self, int fd)
{
    if (fd < 0 || fd > MAX_DESCRIPTOR) {
        PyErr_Format(PyExc_ValueError, "%d is no descriptor", fd);
        return NULL;
    }
    if (fd >= self->count) {
        int count = (fd + 32) * 2;
        Slot *slots = PyMem_Realloc(self->slots, (size_t)count * sizeof *slots);
        if (slots == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        memset(slots + self->count, 0, (size_t)(count - self->count) * sizeof *slots);
        self->slots = slots;
        self->count = count;
    }
    return &self->slots[fd];
}

static PyObject *reads_adopt(Reads *self, PyObject *args)
{
    int fd;
    PyObject *protocol;
    if (!PyArg_ParseTuple(args, "iO", &fd, &protocol))
        return NULL;
    Slot *slot = room_for(self, fd);
    if (slot == NULL)
        return NULL;
    PyObject *old = slot->protocol, *kept = slot->kept;
    Py_INCREF(protocol);
    slot->protocol = protocol;
    slot->kept = NULL;
    slot->leg = PyObject_TypeCheck(protocol, reading->leg);
    Py_XDECREF(old);
    Py_XDECREF(kept);
    Py_RETURN_NONE;
}

static PyObject *reads_release(Reads *self, PyObject *args)
{
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd))
        return NULL;
    Slot *slot = slot_of(self, fd);
    if (slot != NULL) {
        PyObject *old = slot->protocol, *kept = slot->kept;
        slot->protocol = slot->kept = NULL;
        Py_XDECREF(old);
        Py_XDECREF(kept);
    }
    Py_RETURN_NONE;
}

static PyObject *reads_readable(Reads *self, PyObject *args)
{
    int fd, readable;
    if (!PyArg_ParseTuple(args, "ip", &fd, &readable))
        return NULL;
    Slot *slot = room_for(self, fd);
    if (slot == NULL)
        return NULL;
    slot->readable = (char)readable;
    self->resumed |= readable && slot->kept != NULL;
    Py_RETURN_NONE;
}

/* The protocol's exception, told to `failed`. -1: it ends the loop (those that do in asyncio), or was told in vain. */
static int tell(Reads *self, PyObject *protocol)
{
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt) || PyErr_ExceptionMatches(PyExc_SystemExit))
        return -1;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyObject *told = PyObject_CallFunctionObjArgs(self->failed, protocol, value, NULL);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    Py_XDECREF(told);
    return told == NULL ? -1 : 0;
}

/* One of those that were held. 1: done; -1: error. */
static int hand_one(Reads *self, const Held *one)
{
    Slot *slot = slot_of(self, one->fd);
    if (slot == NULL || slot->protocol != one->protocol)
        return 1; /* released meanwhile */
    if (!slot->readable) {
        Py_INCREF(one->data);
        slot->kept = one->data; /* nothing was kept: who is paused is not read */
        return 1;
    }
    PyObject *name = slot->leg ? name_received : name_data_received;
    PyObject *result = PyObject_CallMethodObjArgs(one->protocol, name, one->data, NULL);
    int done = result == NULL && tell(self, one->protocol) < 0 ? -1 : 1;
    Py_XDECREF(result);
    return done;
}

/* Give Python what was read for it. All of it at a time, and what it writes behind it: between system calls the caches and
 * the predicted branches of the interpreter are lost. 1: done; -1: error, and the rest is lost with the loop. */
static int hand(Reads *self)
{
    int done = 1;
    reading->gather(1);
    for (int i = 0; i < self->helds; i++) {
        Held one = self->held[i];
        if (done > 0)
            done = hand_one(self, &one);
        self->held[i] = (Held){NULL, NULL, -1}; /* the collector, which anything may call, counts what stands there */
        Py_DECREF(one.data);
        Py_DECREF(one.protocol);
    }
    self->helds = 0;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    reading->gather(0);
    PyErr_Restore(type, value, traceback);
    return done;
}

/* The same with what was kept for those that may be read again. */
static int hand_kept(Reads *self)
{
    int done = 1;
    self->resumed = 0;
    for (int fd = 0; fd < self->count && done > 0; fd++) {
        Slot *slot = &self->slots[fd];
        if (slot->kept == NULL || !slot->readable)
            continue;
        Py_INCREF(slot->protocol);
        self->held[self->helds++] = (Held){slot->protocol, slot->kept, fd};
        slot->kept = NULL;
        done = hand(self);
    }
    return done;
}

/* Read what is there. 1: done, or held for Python; 0: nothing was, it is asyncio's matter (an end, an error); -1: error. */
static int read_one(Reads *self, int fd, Slot *slot)
{
    ssize_t size = read_now(fd, self->buffer, READ_SIZE);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 1;
    if (size <= 0)
        return 0;
    PyObject *protocol = slot->protocol; /* the slot may be another's, or elsewhere, after what follows */
    int leg = slot->leg;
    Py_INCREF(protocol);
    int done = leg ? reading->relay(protocol, self->buffer, size) : 0;
    if (done == 0) {
        PyObject *data = PyBytes_FromStringAndSize(self->buffer, size);
        if (data != NULL) {
            self->held[self->helds++] = (Held){protocol, data, fd};
            return self->helds < MAX_HELD && size < LARGE ? 1 : hand(self);
        }
        done = -1;
    }
    if (done < 0 && tell(self, protocol) == 0)
        done = 1;
    Py_DECREF(protocol);
    return done;
}

static int pass_on(PyObject *found, const struct epoll_event *event)
{
    PyObject *one = Py_BuildValue("(iI)", event->data.fd, (unsigned int)event->events);
    if (one == NULL)
        return -1;
    int wrong = PyList_Append(found, one);
    Py_DECREF(one);
    return wrong;
}

static double now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static PyObject *reads_poll(Reads *self, PyObject *args)
{
    int epoll, timeout, count;
    PyObject *ready, *timers;
    struct epoll_event events[MAX_EVENTS];
    if (!PyArg_ParseTuple(args, "iiOO", &epoll, &timeout, &ready, &timers))
        return NULL;
    if (self->buffer == NULL && (self->buffer = PyMem_Malloc(READ_SIZE)) == NULL)
        return PyErr_NoMemory();
    Py_ssize_t scheduled = PyObject_Length(timers);
    double until = timeout > 0 ? now_ms() + timeout : 0;
    PyObject *found = PyList_New(0);
    if (found == NULL || scheduled < 0 || PyObject_Length(ready) < 0)
        goto wrong;
    if (self->resumed) {
        if (hand_kept(self) < 0)
            goto wrong;
        timeout = 0; /* asyncio may have something to do now */
    }
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        count = epoll_wait(epoll, events, MAX_EVENTS, timeout);
        Py_END_ALLOW_THREADS
        if (count < 0) {
            if (errno == EINTR && PyErr_CheckSignals() == 0)
                return found; /* a signal's handler may have asked for something */
            if (!PyErr_Occurred())
                PyErr_SetFromErrno(PyExc_OSError);
            goto wrong;
        }
        for (int i = 0; i < count; i++) {
            Slot *slot = events[i].events == EPOLLIN ? slot_of(self, events[i].data.fd) : NULL;
            int done = 0;
            if (slot != NULL && slot->protocol != NULL && slot->readable)
                done = read_one(self, events[i].data.fd, slot);
            if (done < 0 || (done == 0 && pass_on(found, &events[i]) < 0))
                goto wrong;
        }
        if (self->helds > 0 && hand(self) < 0)
            goto wrong;
        if (self->resumed && hand_kept(self) < 0)
            goto wrong;
        /* asyncio's turn comes when it has something to do: descriptors, callbacks, timers that are new or due. */
        if (count == 0 || timeout == 0 || self->resumed || PyList_Size(found) > 0 || PyObject_Length(ready) != 0
                || PyObject_Length(timers) != scheduled)
            return found;
        if (timeout > 0) {
            double left = until - now_ms();
            if (left <= 0)
                return found;
            timeout = (int)left + 1;
        }
    }
wrong:
    Py_XDECREF(found);
    return NULL;
}

/* ---- the module */

static int reads_traverse(Reads *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->failed);
    for (int fd = 0; fd < self->count; fd++)
        Py_VISIT(self->slots[fd].protocol);
    for (int i = 0; i < self->helds; i++)
        Py_VISIT(self->held[i].protocol);
    return 0;
}

static int reads_clear(Reads *self)
{
    Py_CLEAR(self->failed);
    for (int fd = 0; fd < self->count; fd++) {
        Py_CLEAR(self->slots[fd].protocol);
        Py_CLEAR(self->slots[fd].kept);
    }
    while (self->helds > 0) {
        Held one = self->held[--self->helds];
        Py_XDECREF(one.data);
        Py_XDECREF(one.protocol);
    }
    return 0;
}

static void reads_dealloc(PyObject *object)
{
    Reads *self = (Reads *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    reads_clear(self);
    PyMem_Free(self->slots);
    PyMem_Free(self->buffer);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef reads_methods[] = {
    {"adopt", (PyCFunction)reads_adopt, METH_VARARGS, "adopt(fd, protocol): what comes there is read here, while it is readable."},
    {"release", (PyCFunction)reads_release, METH_VARARGS, "release(fd): no more."},
    {"readable", (PyCFunction)reads_readable, METH_VARARGS, "readable(fd, whether): whether it is to be read at all."},
    {"poll", (PyCFunction)reads_poll, METH_VARARGS,
     "poll(epoll_fd, timeout_ms, ready, timers): wait, and read; what happened to others, as (fd, events). It ends with that, "
     "with the time (-1: none), or when ready is not empty or timers are more than before."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef reads_members[] = {
    {"failed", T_OBJECT_EX, offsetof(Reads, failed), 0, "Called with a protocol and what it raised."},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot reads_slots[] = {
    {Py_tp_doc, "The connections that are read here."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, reads_dealloc},
    {Py_tp_traverse, reads_traverse},
    {Py_tp_clear, reads_clear},
    {Py_tp_methods, reads_methods},
    {Py_tp_members, reads_members},
    {0, NULL},
};
static PyType_Spec reads_spec = {"xpyd_sidecar.router.relay._loop.Reads", sizeof(Reads), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, reads_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_loop", "Waiting and reading.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__loop(void)
{
    reading = PyCapsule_Import(READING, 0);
    if (reading == NULL)
        return NULL;
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&reads_spec);
    name_received = PyUnicode_InternFromString("received");
    name_data_received = PyUnicode_InternFromString("data_received");
    if (made == NULL || type == NULL || name_received == NULL || name_data_received == NULL
            || PyModule_AddIntConstant(made, "REVISION", REVISION) < 0 || PyModule_AddObjectRef(made, "Reads", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(made);
        return NULL;
    }
    Py_DECREF(type);
    return made;
}
