/* What a router does for every token, compiled: find whole events in what an engine sent, and pass them on.
 *
 *     event loop ──bytes──▶ UpstreamReceiver ── all of it is events that the stream knows ──▶ Outlet ──▶ the client
 *                                └─ anything else ──▶ UpstreamReceiver.on_bytes, in Python
 *
 * Belongs here: shortcuts alone. A leg takes a read whole, or leaves no trace and lets Python do all of it, which may ask
 * for the simple events at its beginning; so what the router does is written in Python (events, upstream), and `plain` has
 * the same classes without shortcuts. Python's stable interface: one build serves every later version.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_chunks.h"

#define MAX_REST 16 /* bytes behind an event's ids, its line ends included, if it is like others */

#define REVISION 8 /* the same as in plain.py: one that was built for other files is not loaded */

enum { CAREFUL, PLAIN, NOTED };

typedef struct {
    PyObject_HEAD
    PyObject *transport; /* None: what is written goes nowhere */
    int fd;
    char direct;   /* nothing lies in the transport's buffer, so the socket may be written */
    char buffered; /* something was put there since the flag was last cleared */
    Py_ssize_t relayed;
} Outlet;

typedef struct {
    PyObject_HEAD
    char clean;  /* nothing is held, neither part of a chunk nor of an event */
    char framed; /* the client gets chunks */
    int way;
    PyObject *prefix, *middle, *last, *lead, *shown, *log;
} Scanner;

typedef struct {
    PyObject_HEAD
    PyObject *stream, *outlet; /* set while a stream is relayed */
    double last_at;
} UpstreamReceiver;

static PyTypeObject *outlet_type, *scanner_type, *leg_type;
static PyObject *name_write, *name_on_bytes;
static Bytes out, lines; /* used within one call, under the interpreter's lock */

/* ---- Outlet */

/* As send, without waiting: how much the kernel took; -1: errno says why nothing. The C library's send is a point where a
 * thread may be cancelled, which it prepares and undoes around each call of a process with several threads; no thread here is
 * ever cancelled. */
static ssize_t write_now(int fd, const char *from, size_t size)
{
    ssize_t sent;
    do
#ifdef SYS_sendto
        sent = syscall(SYS_sendto, fd, from, size, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0);
#else
        sent = send(fd, from, size, MSG_NOSIGNAL | MSG_DONTWAIT);
#endif
    while (sent < 0 && errno == EINTR);
    return sent;
}

static int outlet_put(Outlet *self, const char *data, Py_ssize_t size)
{
    Py_ssize_t sent = 0;
    if (self->transport == NULL || self->transport == Py_None || size == 0)
        return 0;
    if (self->direct) {
        sent = write_now(self->fd, data, (size_t)size);
        if (sent == size)
            return 0;
        if (sent < 0)
            sent = 0; /* full; or broken, which the transport finds out */
        self->direct = 0;
    }
    self->buffered = 1;
    PyObject *rest = PyBytes_FromStringAndSize(data + sent, size - sent);
    if (rest == NULL)
        return -1;
    PyObject *transport = self->transport;
    Py_INCREF(transport);
    PyObject *done = PyObject_CallMethodObjArgs(transport, name_write, rest, NULL);
    Py_DECREF(transport);
    Py_DECREF(rest);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *outlet_write(Outlet *self, PyObject *data)
{
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    int wrong = outlet_put(self, view.buf, view.len);
    PyBuffer_Release(&view);
    if (wrong)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *outlet_open(Outlet *self, PyObject *args)
{
    PyObject *transport;
    int fd;
    if (!PyArg_ParseTuple(args, "Oi", &transport, &fd))
        return NULL;
    PyObject *old = self->transport;
    Py_INCREF(transport);
    self->transport = transport;
    Py_XDECREF(old);
    self->fd = fd;
    self->direct = fd >= 0;
    self->buffered = 0;
    Py_RETURN_NONE;
}

static PyObject *outlet_shut(Outlet *self, PyObject *ignored)
{
    (void)ignored;
    PyObject *old = self->transport;
    self->transport = NULL;
    self->direct = 0;
    self->fd = -1;
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static int outlet_traverse(Outlet *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->transport);
    return 0;
}

static int outlet_clear(Outlet *self)
{
    Py_CLEAR(self->transport);
    return 0;
}

/* ---- Scanner */

static int bytes_of(PyObject *object, const char **data, Py_ssize_t *size)
{
    if (object == NULL || !PyBytes_CheckExact(object))
        return 0;
    *data = PyBytes_AsString(object);
    *size = PyBytes_Size(object);
    return 1;
}

/* The chunk at `at`, if it is one whole event that does not say that the engine gave up: where it ends; NULL: it is not. */
static const char *plain_end(const char *at, const char *end)
{
    static const char event[] = "data: {\"", error[] = "data: {\"error\"", abort[] = "\"finish_reason\":\"abort\"";
    size_t length;
    const char *start = payload_of(at, end, &length);
    if (start == NULL || (size_t)(end - start) < length + 2 || length < sizeof error
            || memcmp(start, event, sizeof event - 1) != 0 || memcmp(start, error, sizeof error - 1) == 0
            || memcmp(start + length - 2, "\n\n\r\n", 4) != 0
            || memchr(start, '\n', length) != start + length - 2
            || memmem(start, length, abort, sizeof abort - 1) != NULL)
        return NULL;
    return start + length + 2;
}

/* What a stream learned; the sizes are 0 where it did not. */
typedef struct {
    const char *prefix, *middle, *last, *lead, *shown;
    Py_ssize_t prefix_size, middle_size, last_size, lead_size, shown_size;
} Learned;

static int learned(Scanner *self, Learned *as)
{
    return bytes_of(self->prefix, &as->prefix, &as->prefix_size) && bytes_of(self->middle, &as->middle, &as->middle_size)
        && bytes_of(self->last, &as->last, &as->last_size) && bytes_of(self->lead, &as->lead, &as->lead_size)
        && bytes_of(self->shown, &as->shown, &as->shown_size)
        && as->prefix_size > 0 && as->middle_size > 0 && as->last_size >= 3
        && self->log != NULL && PyByteArray_CheckExact(self->log);
}

/* The chunk at `at`, if it is an event as it was learned: where it ends, and `out` gets what the client gets of it, `lines`
 * what is noted; NULL: it is not, or memory ran out. */
static const char *noted_end(const Learned *as, const char *at, const char *end)
{
    size_t length;
    const char *start = payload_of(at, end, &length);
    if (start == NULL || (size_t)(end - start) < length + 2
            || length < (size_t)(as->prefix_size + as->middle_size + as->last_size)
            || memcmp(start, as->prefix, (size_t)as->prefix_size) != 0)
        return NULL;
    const char *next = start + length + 2, *text = start + as->prefix_size, *close = next - as->last_size, *ids = close;
    if (memcmp(close, as->last, (size_t)as->last_size) != 0)
        return NULL;
    while (ids > text && ((ids[-1] >= '0' && ids[-1] <= '9') || ids[-1] == ','))
        ids--;
    const char *stop = ids - as->middle_size;
    if (stop < text || close == ids || memcmp(stop, as->middle, (size_t)as->middle_size) != 0
            || memchr(text, '\n', (size_t)(stop - text)) != NULL)
        return NULL;
    size_t text_size = (size_t)(stop - text), ids_size = (size_t)(close - ids);
    if (reserve(&lines, text_size + ids_size + 2) < 0
            || reserve(&out, text_size + (size_t)(as->lead_size + as->shown_size) + 32) < 0)
        return NULL;
    put(&lines, text, text_size);
    lines.data[lines.size++] = '\t';
    for (const char *id = ids; id < close; id++)
        lines.data[lines.size++] = *id == ',' ? '\t' : *id;
    lines.data[lines.size++] = '\n';
    if (text_size != 2 || text[0] != '{' || text[1] != '}') { /* {}: made for the ids alone */
        put_size(&out, (size_t)(as->lead_size + as->shown_size) + text_size);
        put(&out, as->lead, (size_t)as->lead_size);
        put(&out, text, text_size);
        put(&out, as->shown, (size_t)as->shown_size);
        put(&out, "\r\n", 2);
    }
    return next;
}

/* How far, from `from` on, a read is events that the stream knows; it has noted them then, and `send` of `sending` bytes is
 * what the client gets. `whole`: up to the read's end or not at all. `from`: a case for Python; -1: error. */
static Py_ssize_t scan(Scanner *self, const char *begin, Py_ssize_t size, Py_ssize_t from, int whole, const char **sent,
                       Py_ssize_t *sending)
{
    Learned as = {0};
    int notes = self->way == NOTED;
    if (!self->clean || !self->framed || self->way == CAREFUL
            || from < 0 || from >= size || (notes && !learned(self, &as)))
        return from;
    const char *at = begin + from, *end = begin + size, *next;
    out.size = lines.size = 0;
    while (at < end && (next = notes ? noted_end(&as, at, end) : plain_end(at, end)) != NULL)
        at = next;
    if (PyErr_Occurred())
        return -1;
    if (at == begin + from || (whole && at < end))
        return from;
    *sent = begin + from;
    *sending = at - *sent;
    if (notes) {
        Py_ssize_t before = PyByteArray_Size(self->log);
        if (PyByteArray_Resize(self->log, before + (Py_ssize_t)lines.size) < 0)
            return -1;
        memcpy(PyByteArray_AsString(self->log) + before, lines.data, lines.size);
        *sent = out.data;
        *sending = (Py_ssize_t)out.size;
    }
    return at - begin;
}

static PyObject *scanner_quick(Scanner *self, PyObject *args)
{
    PyObject *data;
    Py_ssize_t from = 0, size, sending = 0;
    const char *begin, *sent = NULL;
    if (!PyArg_ParseTuple(args, "O|n", &data, &from))
        return NULL;
    if (!bytes_of(data, &begin, &size))
        Py_RETURN_NONE;
    Py_ssize_t to = scan(self, begin, size, from, 0, &sent, &sending);
    if (to < 0)
        return NULL;
    if (to == from)
        Py_RETURN_NONE;
    if (self->way == PLAIN && sending == size) /* as it is: no copy */
        return Py_BuildValue("(On)", data, to);
    return Py_BuildValue("(y#n)", sent == NULL ? "" : sent, sending, to);
}

/* What stands between text and ids, and behind them, by API, in the latest stream that was learned from: a chat's first
 * event has no ids. */
static struct {
    PyObject *middle, *last, *shown;
} guesses[2];

static PyObject *joined(const char *data, size_t size, const char *more, const char *last, const char *end)
{
    size_t extra = strlen(more);
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(size + extra + (size_t)(end - last)));
    if (made != NULL) {
        char *to = PyBytes_AsString(made);
        memcpy(to, data, size);
        memcpy(to + size, more, extra);
        memcpy(to + size + extra, last, (size_t)(end - last));
    }
    return made;
}

static void replace(PyObject **at, PyObject *by)
{
    PyObject *old = *at;
    *at = by;
    Py_XDECREF(old);
}

/* Where the event says its ids, if others can be recognized by it: its middle from `stop` to `ids`, and `close`, its bracket. */
static int says_ids(const char *text, const char *end, const char **stop, const char **ids, const char **close)
{
    static const char behind[] = ",\"logprobs\":null,\"finish_reason\":null,", list[] = "\"token_ids\":[";
    if (memmem(text, (size_t)(end - text), "\"prompt_token_ids\":[", 20) != NULL
            || (*stop = memmem(text, (size_t)(end - text), behind, sizeof behind - 1)) == NULL
            || (*ids = memmem(*stop, (size_t)(end - *stop), list, sizeof list - 1)) == NULL)
        return 0;
    *ids += sizeof list - 1;
    *close = memchr(*ids, ']', (size_t)(end - *ids));
    return *close != NULL && end - *close - 1 <= MAX_REST - 2
        && memchr(*stop, '[', (size_t)(*ids - *stop)) == *ids - 1;
}

static PyObject *scanner_learn(Scanner *self, PyObject *args)
{
    PyObject *data, *log, *middle = NULL, *last = NULL, *shown = NULL;
    Py_ssize_t from, to;
    int chat;
    if (!PyArg_ParseTuple(args, "SnnpO!", &data, &from, &to, &chat, &PyByteArray_Type, &log))
        return NULL;
    if (from < 0 || from > to || to > PyBytes_Size(data)) {
        PyErr_SetString(PyExc_ValueError, "an event outside of the data");
        return NULL;
    }
    const char *begin = PyBytes_AsString(data), *at = begin + from, *end = begin + to, *stop, *ids, *close;
    const char *key = chat ? "\"delta\":" : "\"text\":", *text = memmem(at, (size_t)(end - at), key, strlen(key));
    if (text == NULL || memmem(at, (size_t)(text - at), "\"prompt_token_ids\":[", 20) != NULL)
        Py_RETURN_FALSE;
    text += strlen(key);
    if (says_ids(text, end, &stop, &ids, &close)) {
        middle = PyBytes_FromStringAndSize(stop, ids - stop);
        last = joined("]", 1, "", close + 1, end);
        shown = joined(stop, (size_t)(ids - stop - 1), "null", close + 1, end);
        if (last != NULL)
            PyBytes_ConcatAndDel(&last, PyBytes_FromString("\n\n\r\n"));
        if (shown != NULL)
            PyBytes_ConcatAndDel(&shown, PyBytes_FromString("\n\n"));
        if (middle == NULL || last == NULL || shown == NULL) {
            Py_XDECREF(middle);
            Py_XDECREF(last);
            Py_XDECREF(shown);
            return NULL;
        }
        replace(&guesses[chat].middle, middle);
        replace(&guesses[chat].last, last);
        replace(&guesses[chat].shown, shown);
    } else if (guesses[chat].middle == NULL)
        Py_RETURN_FALSE;
    PyObject *prefix = PyBytes_FromStringAndSize(at, text - at);
    if (prefix == NULL)
        return NULL;
    Py_INCREF(prefix);
    Py_INCREF(log);
    Py_INCREF(guesses[chat].middle);
    Py_INCREF(guesses[chat].last);
    Py_INCREF(guesses[chat].shown);
    replace(&self->prefix, prefix);
    replace(&self->lead, prefix);
    replace(&self->middle, guesses[chat].middle);
    replace(&self->last, guesses[chat].last);
    replace(&self->shown, guesses[chat].shown);
    replace(&self->log, log);
    self->clean = self->framed = 1;
    self->way = NOTED;
    Py_RETURN_TRUE;
}

static int scanner_traverse(Scanner *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->prefix);
    Py_VISIT(self->middle);
    Py_VISIT(self->last);
    Py_VISIT(self->lead);
    Py_VISIT(self->shown);
    Py_VISIT(self->log);
    return 0;
}

static int scanner_clear(Scanner *self)
{
    Py_CLEAR(self->prefix);
    Py_CLEAR(self->middle);
    Py_CLEAR(self->last);
    Py_CLEAR(self->lead);
    Py_CLEAR(self->shown);
    Py_CLEAR(self->log);
    return 0;
}

/* ---- UpstreamReceiver */

/* Relay a read of a leg. 1: done; 0: nothing was, it is a matter of its `on_bytes`; -1: error. */
static int leg_relays(UpstreamReceiver *self, const char *data, Py_ssize_t size)
{
    const char *sent;
    Py_ssize_t sending;
    if (self->stream == NULL)
        return 0;
    Py_ssize_t found = scan((Scanner *)self->stream, data, size, 0, 1, &sent, &sending);
    if (found <= 0)
        return (int)found;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now); /* some milliseconds late, and far cheaper */
    self->last_at = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
    PyObject *outlet = self->outlet;
    Py_INCREF(outlet);
    ((Outlet *)outlet)->relayed += sending;
    int wrong = outlet_put((Outlet *)outlet, sent, sending);
    Py_DECREF(outlet);
    return wrong ? -1 : 1;
}

static PyObject *leg_data_received(UpstreamReceiver *self, PyObject *data)
{
    const char *begin;
    Py_ssize_t size;
    int done = bytes_of(data, &begin, &size) ? leg_relays(self, begin, size) : 0;
    if (done < 0)
        return NULL;
    if (done)
        Py_RETURN_NONE;
    return PyObject_CallMethodObjArgs((PyObject *)self, name_on_bytes, data, NULL);
}

static PyObject *leg_relay(UpstreamReceiver *self, PyObject *args)
{
    PyObject *stream, *outlet;
    if (!PyArg_ParseTuple(args, "O!O!", scanner_type, &stream, outlet_type, &outlet))
        return NULL;
    Py_INCREF(stream);
    Py_INCREF(outlet);
    PyObject *old_stream = self->stream, *old_outlet = self->outlet;
    self->stream = stream;
    self->outlet = outlet;
    Py_XDECREF(old_stream);
    Py_XDECREF(old_outlet);
    Py_RETURN_NONE;
}

static int leg_clear(UpstreamReceiver *self)
{
    Py_CLEAR(self->stream);
    Py_CLEAR(self->outlet);
    return 0;
}

static PyObject *leg_relay_no_more(UpstreamReceiver *self, PyObject *ignored)
{
    (void)ignored;
    leg_clear(self);
    Py_RETURN_NONE;
}

static int leg_traverse(UpstreamReceiver *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->stream);
    Py_VISIT(self->outlet);
    return 0;
}

/* ---- the module */

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    /* Of ours, not of a class that was made of it in Python: that one has cleared what is its own. */
    PyTypeObject *ours = PyType_IsSubtype(type, outlet_type) ? outlet_type
        : PyType_IsSubtype(type, scanner_type) ? scanner_type : leg_type;
    inquiry clear = (inquiry)PyType_GetSlot(ours, Py_tp_clear);
    clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef outlet_methods[] = {
    {"open", (PyCFunction)outlet_open, METH_VARARGS, "open(transport, fd): write there; fd is -1 where bytes are encrypted."},
    {"shut", (PyCFunction)outlet_shut, METH_NOARGS, "What is written from now on goes nowhere."},
    {"write", (PyCFunction)outlet_write, METH_O, "write(data): to the socket as far as it takes it, the rest to the transport."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef outlet_members[] = {
    {"direct", T_BOOL, offsetof(Outlet, direct), 0, "Nothing lies in the transport's buffer."},
    {"buffered", T_BOOL, offsetof(Outlet, buffered), 0, "Something was put there since this was last cleared."},
    {"fd", T_INT, offsetof(Outlet, fd), READONLY, "-1: none."},
    {"relayed", T_PYSSIZET, offsetof(Outlet, relayed), 0, "Bytes that legs wrote since this was last cleared."},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot outlet_slots[] = {
    {Py_tp_doc, "Where bytes for a peer are written."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, outlet_traverse},
    {Py_tp_clear, outlet_clear},
    {Py_tp_methods, outlet_methods},
    {Py_tp_members, outlet_members},
    {0, NULL},
};
static PyType_Spec outlet_spec = {"xpyd_sidecar.router.relay._fast.Outlet", sizeof(Outlet), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, outlet_slots};

static PyMethodDef scanner_methods[] = {
    {"quick", (PyCFunction)scanner_quick, METH_VARARGS,
     "quick(data, at=0): what may be relayed of the simple events there, and where they end; None: the first is none."},
    {"learn", (PyCFunction)scanner_learn, METH_VARARGS,
     "learn(data, at, to, chat, log): recognize events like the one there, and note them in the log. False: it says too little."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef scanner_members[] = {
    {"_clean", T_BOOL, offsetof(Scanner, clean), 0, NULL},
    {"_framed", T_BOOL, offsetof(Scanner, framed), 0, NULL},
    {"_way", T_INT, offsetof(Scanner, way), 0, NULL},
    {"_prefix", T_OBJECT_EX, offsetof(Scanner, prefix), 0, NULL},
    {"_middle", T_OBJECT_EX, offsetof(Scanner, middle), 0, NULL},
    {"_last", T_OBJECT_EX, offsetof(Scanner, last), 0, NULL},
    {"_lead", T_OBJECT_EX, offsetof(Scanner, lead), 0, NULL},
    {"_shown", T_OBJECT_EX, offsetof(Scanner, shown), 0, NULL},
    {"_log", T_OBJECT_EX, offsetof(Scanner, log), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot scanner_slots[] = {
    {Py_tp_doc, "What a stream of events knows of its events."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, scanner_traverse},
    {Py_tp_clear, scanner_clear},
    {Py_tp_methods, scanner_methods},
    {Py_tp_members, scanner_members},
    {0, NULL},
};
static PyType_Spec scanner_spec = {"xpyd_sidecar.router.relay._fast.Scanner", sizeof(Scanner), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, scanner_slots};

static PyMethodDef leg_methods[] = {
    {"data_received", (PyCFunction)leg_data_received, METH_O, "data_received(data): relayed at once, or a matter of `on_bytes`."},
    {"relay", (PyCFunction)leg_relay, METH_VARARGS, "relay(stream, outlet): events go there from now on."},
    {"relay_no_more", (PyCFunction)leg_relay_no_more, METH_NOARGS, "Everything is a matter of `on_bytes` again."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef leg_members[] = {
    {"last_at", T_DOUBLE, offsetof(UpstreamReceiver, last_at), 0, "When bytes last came, monotonic seconds."},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot leg_slots[] = {
    {Py_tp_doc, "The receiving side of a connection to an engine."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, leg_traverse},
    {Py_tp_clear, leg_clear},
    {Py_tp_methods, leg_methods},
    {Py_tp_members, leg_members},
    {0, NULL},
};
static PyType_Spec leg_spec = {"xpyd_sidecar.router.relay._fast.UpstreamReceiver", sizeof(UpstreamReceiver), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, leg_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "Shortcuts for every token.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    outlet_type = (PyTypeObject *)PyType_FromSpec(&outlet_spec);
    scanner_type = (PyTypeObject *)PyType_FromSpec(&scanner_spec);
    leg_type = (PyTypeObject *)PyType_FromSpec(&leg_spec);
    name_write = PyUnicode_InternFromString("write");
    name_on_bytes = PyUnicode_InternFromString("on_bytes");
    if (outlet_type == NULL || scanner_type == NULL || leg_type == NULL || name_write == NULL || name_on_bytes == NULL
            || PyModule_AddIntConstant(made, "REVISION", REVISION) < 0
            || PyModule_AddObjectRef(made, "Outlet", (PyObject *)outlet_type) < 0
            || PyModule_AddObjectRef(made, "Scanner", (PyObject *)scanner_type) < 0
            || PyModule_AddObjectRef(made, "UpstreamReceiver", (PyObject *)leg_type) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
