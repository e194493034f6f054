/* Bytes out of memory, also of memory shared with another process, into scattered blocks, summed up on the way, without
 * the interpreter.
 *
 *     Scatter(memory, size, count, ids, stride, offset, part)    count rows of size bytes; the nth lies at
 *                                                                memory + ids[n] * stride + offset; ids None: n * size.
 *                                                                Each part of a row is summed up; part 0: nothing is
 *     Scatter.read(address, step, ticket_at, ticket)             from memory that another process has, too, where rows
 *                                                                begin step bytes one after the other
 *     Scatter.copy(address)                                      from this process's own
 *     Scatter.sums()                                             of the parts that have come, 8 bytes each
 *     sums(data, part)                                           of packed parts, 8 bytes each
 *
 * Belongs here: loops over bytes. What is fetched and where it belongs is said in Python, and `moves_plain` has the same
 * in Python alone. What a sum is stands in `_sums.h`.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

#include "_scatter.h"

#define REVISION 10 /* the same as in moves_plain.py: one that was built for other files is not loaded */
#define TICKET 32

/* Bring all from memory in which the rows begin `step` bytes one after the other. */
static void carry_rows(Scatter *self, const unsigned char *from, size_t step)
{
    size_t pieces = self->count * self->per_block;
    for (size_t piece = 0; piece < pieces; piece++)
        bring(self, piece, from + piece / self->per_block * step + piece % self->per_block * self->part);
    self->done = self->total;
    self->summed = pieces;
    fence();
}

static PyObject *scatter_read(Scatter *self, PyObject *args)
{
    unsigned long long address, ticket_at;
    const char *ticket;
    Py_ssize_t step, ticket_size;
    if (!PyArg_ParseTuple(args, "KnKy#", &address, &step, &ticket_at, &ticket, &ticket_size))
        return NULL;
    if (ticket_size != TICKET || step < 0 || (size_t)step < self->size)
        return PyErr_Format(PyExc_ValueError, "a ticket has %d bytes, and rows do not overlap", TICKET);
    int holds;
    Py_BEGIN_ALLOW_THREADS
    carry_rows(self, (const unsigned char *)(uintptr_t)address, (size_t)step);
    holds = !memcmp((const char *)(uintptr_t)ticket_at, ticket, TICKET); /* looked at after the bytes */
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(holds);
}

static PyObject *scatter_copy(Scatter *self, PyObject *args)
{
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K", &address))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    carry_rows(self, (const unsigned char *)(uintptr_t)address, self->size);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *scatter_sums(Scatter *self, PyObject *unused)
{
    (void)unused;
    return PyBytes_FromStringAndSize((const char *)self->sum, self->cover ? (Py_ssize_t)(self->summed * 8) : 0);
}

static PyMethodDef scatter_methods[] = {
    {"read", (PyCFunction)scatter_read, METH_VARARGS, NULL},
    {"copy", (PyCFunction)scatter_copy, METH_VARARGS, NULL},
    {"sums", (PyCFunction)scatter_sums, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef scatter_members[] = {
    {"row", T_PYSSIZET, offsetof(Scatter, size), READONLY, NULL},
    {"rows", T_PYSSIZET, offsetof(Scatter, count), READONLY, NULL},
    {0},
};

static PyType_Slot scatter_slots[] = {
    {Py_tp_new, scatter_new},         {Py_tp_dealloc, scatter_free}, {Py_tp_methods, scatter_methods},
    {Py_tp_members, scatter_members}, {0, NULL},
};

static PyType_Spec scatter_spec = {"xpyd_sidecar.transport._moves.Scatter", sizeof(Scatter), 0, Py_TPFLAGS_DEFAULT,
                                   scatter_slots};

/* ---- of the module */

static PyObject *moves_sums(PyObject *module, PyObject *args)
{
    Py_buffer data;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*n", &data, &size))
        return NULL;
    if (size < 1 || data.len % size) {
        PyBuffer_Release(&data);
        PyErr_SetString(PyExc_ValueError, "not whole parts");
        return NULL;
    }
    size_t each = (size_t)size, count = (size_t)(data.len / size);
    PyObject *out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * 8));
    if (out) {
        char *put = PyBytes_AsString(out);
        const unsigned char *from = data.buf;
        Py_BEGIN_ALLOW_THREADS
        for (size_t n = 0; n < count; n++, put += 8) {
            uint64_t sum = sum_of(from + n * each, each);
            memcpy(put, &sum, 8);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return out;
}

static PyMethodDef methods[] = {
    {"sums", moves_sums, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_moves", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__moves(void)
{
    choose_sums();
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    scatter_type = (PyTypeObject *)PyType_FromSpec(&scatter_spec);
    if (!scatter_type || PyModule_AddObjectRef(made, "Scatter", (PyObject *)scatter_type) < 0 ||
        PyModule_AddIntConstant(made, "REVISION", REVISION) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
