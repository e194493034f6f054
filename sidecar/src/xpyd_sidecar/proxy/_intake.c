/* A read that is exactly one plain request for generation: its head, in one call.
 *
 *     POST /v1/chat/completions HTTP/1.1 CRLF name: value CRLF … CRLF CRLF body ──▶ path, headers, body
 *
 * Belongs here: what `connection.Connection` and its parser make of such a read between two requests. It takes the read whole
 * or not at all: another path, a header that changes how a request is framed or answered, a value that is not plain, a
 * length that does not fit, and all that is malformed is a case for Python. Python's stable interface.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <string.h>

#define REVISION 4 /* the same as in intake.py */

#define MAX_NAME 64
#define MAX_LENGTH 10 /* digits of a body's length */

static const char *const PATHS[] = {"/v1/chat/completions", "/v1/completions"};
enum { ROUTES = sizeof PATHS / sizeof *PATHS };
static PyObject *paths[ROUTES], *targets[ROUTES];

/* Names that most clients send, in lower case, made once. */
static const char *const NAMES[] = {"host", "content-length", "content-type", "authorization", "accept", "accept-encoding",
    "user-agent", "connection", "x-request-id", "traceparent", "accept-language"};
enum { KNOWN = sizeof NAMES / sizeof *NAMES, HOST = 0, LENGTH = 1, CONNECTION = 7 };
static PyObject *names[KNOWN];

/* Headers that say how a request is framed, answered or upgraded. */
static const char *const CAREFUL[] = {"transfer-encoding", "expect", "upgrade", "te", "trailer", "proxy-connection", "keep-alive",
    "http2-settings"};
enum { CAREFULS = sizeof CAREFUL / sizeof *CAREFUL };

static int in_name(unsigned char c)
{
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
}

static int is(const char *data, size_t size, const char *word)
{
    return strlen(word) == size && memcmp(data, word, size) == 0;
}

static int is_keep_alive(const char *data, size_t size)
{
    static const char word[] = "keep-alive";
    if (size != sizeof word - 1)
        return 0;
    for (size_t i = 0; i < size; i++)
        if ((data[i] | 32) != word[i])
            return 0;
    return 1;
}

/* Where the line at `at` ends (at its CR), if all of it is printable ASCII; NULL: it is not. */
static const char *line_end(const char *at, const char *end)
{
    while (at < end && (unsigned char)*at >= 0x20 && (unsigned char)*at < 0x7f)
        at++;
    return end - at >= 2 && at[0] == '\r' && at[1] == '\n' ? at : NULL;
}

/* Put one header into the dictionary, where it is the first of its name; -1: error. */
static int put_header(PyObject *headers, int known, const char *name, size_t name_size, const char *value, size_t size)
{
    PyObject *key = known < KNOWN ? names[known] : PyBytes_FromStringAndSize(name, (Py_ssize_t)name_size);
    if (key == NULL)
        return -1;
    if (known < KNOWN)
        Py_INCREF(key);
    int done = PyDict_Contains(headers, key);
    if (done == 0) {
        PyObject *object = PyBytes_FromStringAndSize(value, (Py_ssize_t)size);
        done = object == NULL ? -1 : PyDict_SetItem(headers, key, object);
        Py_XDECREF(object);
    }
    Py_DECREF(key);
    return done < 0 ? -1 : 0;
}

/* The headers from `at` on, up to and with the empty line: where the body begins. NULL: Python's case, or an error. */
static const char *headers_end(const char *at, const char *end, PyObject *headers, long long most, long long *length)
{
    int hosts = 0, lengths = 0;
    long long all = 0;
    for (;;) {
        const char *stop = line_end(at, end);
        if (stop == NULL)
            return NULL;
        if (stop == at)
            return hosts == 1 && lengths == 1 ? at + 2 : NULL;
        char name[MAX_NAME];
        size_t size = 0;
        for (; at < stop && *at != ':'; at++) {
            char c = *at >= 'A' && *at <= 'Z' ? *at | 32 : *at;
            if (size == MAX_NAME || !in_name((unsigned char)c))
                return NULL;
            name[size++] = c;
        }
        if (at == stop || size == 0)
            return NULL;
        at++;
        if (at < stop && *at == ' ')
            at++;
        size_t value = (size_t)(stop - at);
        if (value == 0 || at[0] == ' ' || stop[-1] == ' ')
            return NULL;
        int known = 0;
        while (known < KNOWN && !is(name, size, NAMES[known]))
            known++;
        if (known == HOST)
            hosts++;
        else if (known == LENGTH) {
            if (++lengths > 1 || value > MAX_LENGTH || *at == '0')
                return NULL;
            for (const char *digit = at; digit < stop; digit++) {
                if (*digit < '0' || *digit > '9')
                    return NULL;
                *length = *length * 10 + (*digit - '0');
            }
        } else if (known == CONNECTION) {
            if (!is_keep_alive(at, value))
                return NULL;
        } else if (known == KNOWN)
            for (int i = 0; i < CAREFULS; i++)
                if (is(name, size, CAREFUL[i]))
                    return NULL;
        all += (long long)(size + value) + 4;
        if (hosts > 1 || all > most || put_header(headers, known, name, size, at, value) < 0)
            return NULL;
        at = stop + 2;
    }
}

static PyObject *request(PyObject *ignored, PyObject *const *args, Py_ssize_t count)
{
    static const char method[] = "POST ", version[] = " HTTP/1.1\r\n";
    (void)ignored;
    if (count != 3 || !PyBytes_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "request(data, header_bytes, body_bytes)");
    long long header_bytes = PyLong_AsLongLong(args[1]), body_bytes = PyLong_AsLongLong(args[2]), length = 0;
    if (PyErr_Occurred())
        return NULL;
    const char *at = PyBytes_AsString(args[0]), *end = at + PyBytes_Size(args[0]);
    const size_t first = sizeof method - 1, last = sizeof version - 1;
    if ((size_t)(end - at) < first || memcmp(at, method, first) != 0)
        Py_RETURN_NONE;
    at += first;
    int route = 0;
    for (; route < ROUTES; route++) {
        size_t size = strlen(PATHS[route]);
        if ((size_t)(end - at) > size + last && memcmp(at, PATHS[route], size) == 0 && memcmp(at + size, version, last) == 0) {
            at += size + last;
            break;
        }
    }
    if (route == ROUTES)
        Py_RETURN_NONE;
    PyObject *headers = PyDict_New();
    if (headers == NULL)
        return NULL;
    const char *body = headers_end(at, end, headers, header_bytes, &length);
    PyObject *made = NULL;
    if (body != NULL && end - body == length && length <= body_bytes)
        made = Py_BuildValue("(OOOy#)", paths[route], targets[route], headers, body, (Py_ssize_t)length);
    Py_DECREF(headers);
    if (made == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return made;
}

static PyMethodDef methods[] = {
    {"request", (PyCFunction)(void (*)(void))request, METH_FASTCALL,
     "request(data, header_bytes, body_bytes): (path, target, headers, body) of a read that is one plain request; else None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_intake", "Requests that came whole.", -1, methods, NULL, NULL, NULL,
    NULL};

PyMODINIT_FUNC PyInit__intake(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made == NULL || PyModule_AddIntConstant(made, "REVISION", REVISION) < 0)
        goto failed;
    for (int i = 0; i < ROUTES; i++)
        if ((paths[i] = PyUnicode_InternFromString(PATHS[i])) == NULL || (targets[i] = PyBytes_FromString(PATHS[i])) == NULL)
            goto failed;
    for (int i = 0; i < KNOWN; i++)
        if ((names[i] = PyBytes_FromString(NAMES[i])) == NULL)
            goto failed;
    return made;
failed:
    Py_XDECREF(made);
    return NULL;
}
