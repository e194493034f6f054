/* Gate: whether bytes may still be written into blocks, as one word that Python and threads without the interpreter share.
 *
 *     word = how many are inside | CLOSED          who enters adds one, and looks; done is: CLOSED, and nobody
 *
 * Who is refused was counted for a moment, which can only make `done` late. What it is for stands in `landing`.
 */
#ifndef XPYD_GATE_H
#define XPYD_GATE_H

#define CLOSED ((uint64_t)1 << 63)

typedef struct {
    PyObject_HEAD
    uint64_t word;
} Gate;

static PyTypeObject *gate_type;

/* Begin to write, if that may still be done; then `leave_gate` must follow. */
static int enter_gate(Gate *gate)
{
    if (!(__atomic_fetch_add(&gate->word, 1, __ATOMIC_SEQ_CST) & CLOSED))
        return 1;
    __atomic_fetch_sub(&gate->word, 1, __ATOMIC_SEQ_CST);
    return 0;
}

/* The write has ended: whoever finds the gate done from here on sees what was written. */
static void leave_gate(Gate *gate)
{
    __atomic_fetch_sub(&gate->word, 1, __ATOMIC_SEQ_CST);
}

static int gate_closed(const Gate *gate)
{
    return (__atomic_load_n(&gate->word, __ATOMIC_SEQ_CST) & CLOSED) != 0;
}

static PyObject *gate_enter(Gate *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(enter_gate(self));
}

static PyObject *gate_leave(Gate *self, PyObject *unused)
{
    (void)unused;
    if (!(__atomic_load_n(&self->word, __ATOMIC_SEQ_CST) & ~CLOSED)) {
        PyErr_SetString(PyExc_RuntimeError, "nobody is inside");
        return NULL;
    }
    leave_gate(self);
    Py_RETURN_NONE;
}

static PyObject *gate_close(Gate *self, PyObject *unused)
{
    (void)unused;
    __atomic_fetch_or(&self->word, CLOSED, __ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyObject *gate_done(Gate *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(__atomic_load_n(&self->word, __ATOMIC_SEQ_CST) == CLOSED);
}

static PyObject *gate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    if (!PyArg_ParseTuple(args, ""))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return make(type, 0); /* memory of zeros: open, and nobody inside */
}

static void gate_free(Gate *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    freefunc give = (freefunc)PyType_GetSlot(type, Py_tp_free);
    give(self);
    Py_DECREF(type);
}

static PyMethodDef gate_methods[] = {
    {"enter", (PyCFunction)gate_enter, METH_NOARGS, NULL},
    {"leave", (PyCFunction)gate_leave, METH_NOARGS, NULL},
    {"close", (PyCFunction)gate_close, METH_NOARGS, NULL},
    {"done", (PyCFunction)gate_done, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot gate_slots[] = {
    {Py_tp_new, gate_new}, {Py_tp_dealloc, gate_free}, {Py_tp_methods, gate_methods}, {0, NULL}};

static PyType_Spec gate_spec = {"xpyd_sidecar.transport._stripes.Gate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT, gate_slots};

#endif
