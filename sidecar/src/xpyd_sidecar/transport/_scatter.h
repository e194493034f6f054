/* Scatter: rows (`_rows.h`) as an object of Python's. */
#ifndef XPYD_SCATTER_H
#define XPYD_SCATTER_H

#include "_rows.h"

static PyTypeObject *scatter_type;

static int place_blocks(Scatter *self, PyObject *ids, Py_ssize_t stride, Py_ssize_t offset)
{
    Py_buffer found = {0};
    const int64_t *numbers = NULL;
    if (ids != Py_None) {
        if (PyObject_GetBuffer(ids, &found, PyBUF_SIMPLE) < 0)
            return -1;
        numbers = found.buf;
    }
    int wrong = ids != Py_None && (size_t)found.len != self->count * sizeof(int64_t);
    size_t room = (size_t)self->memory.len;
    for (size_t n = 0; n < self->count && !wrong; n++) {
        if (!numbers)
            self->at[n] = n * self->size;
        else if (numbers[n] < 0 || (stride && (uint64_t)numbers[n] > room / (size_t)stride))
            wrong = 1;
        else
            self->at[n] = (size_t)numbers[n] * (size_t)stride + (size_t)offset;
        wrong = wrong || self->size > room || self->at[n] > room - self->size;
    }
    if (ids != Py_None)
        PyBuffer_Release(&found);
    if (wrong)
        PyErr_SetString(PyExc_ValueError, "blocks outside of the memory");
    return wrong ? -1 : 0;
}

static PyObject *scatter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *memory, *ids;
    Py_ssize_t size, count, stride, offset;
    Py_ssize_t part;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "OnnOnnn", &memory, &size, &count, &ids, &stride, &offset, &part))
        return NULL;
    if (size < 1 || count < 1 || stride < 0 || offset < 0 || part < 0 || part > size || count > PY_SSIZE_T_MAX / size / 16) {
        PyErr_SetString(PyExc_ValueError, "no blocks, or too many");
        return NULL;
    }
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Scatter *self = (Scatter *)make(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        goto failed;
    self->held = 1;
    self->size = (size_t)size;
    self->count = (size_t)count;
    self->total = self->size * self->count;
    self->cover = part > 0;
    self->part = part ? (size_t)part : self->size < UNSUMMED ? self->size : UNSUMMED;
    self->per_block = (self->size + self->part - 1) / self->part;
    self->at = PyMem_Malloc(self->count * sizeof *self->at);
    if (part)
        self->sum = PyMem_Malloc(self->count * self->per_block * sizeof *self->sum);
    if (!self->at || (part && !self->sum)) {
        PyErr_NoMemory();
        goto failed;
    }
    if (place_blocks(self, ids, stride, offset) < 0)
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static void scatter_free(Scatter *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->held)
        PyBuffer_Release(&self->memory);
    PyMem_Free(self->at);
    PyMem_Free(self->sum);
    freefunc give = (freefunc)PyType_GetSlot(type, Py_tp_free);
    give(self);
    Py_DECREF(type);
}

#endif
