/* What `_loop` needs of `_fast`, which gives it as a capsule of the name below. With a change here both get a new REVISION. */
#ifndef XPYD_READING_H
#define XPYD_READING_H

#define READING "xpyd_sidecar.router.relay._fast.reading"

typedef struct {
    PyTypeObject *leg;
    /* Relay a read of a leg. 1: done; 0: nothing was, it is a matter of its `received`; -1: error. */
    int (*relay)(PyObject *leg, const char *data, Py_ssize_t size);
    /* Whether what is written to outlets is gathered; all of it leaves when it no longer is. */
    void (*gather)(int whether);
} Reading;

#endif
