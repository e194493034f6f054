/* A request's body, split into its shape and the values that requests of one shape differ in (routing/shapes.py).
 *
 *     {"model":"tiny","messages": [{"role":… ,"max_tokens": 8 ,"stream":true}
 *     └ key ──────────────────────┘ └ slot    └ key         └ slot └ key
 *
 * Belongs here: `shapes.looked`, in one pass over the bytes, and its reverse, `shapes.message`; and `outline.judged`, which
 * stands before everything that Python builds of a body. The first takes a body whole
 * or not at all: what is not strictly JSON, says a name twice or with escapes, is nested deeply or has numbers that are not
 * plain is a case for Python. Python's stable interface.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdio.h>

#include "_json.h"

#define REVISION 2 /* the same as in intake.py */

#define MAX_FIELDS 64
#define MAX_KEY 4096 /* bytes of a body that are not slots; callers may ask for less */
#define MAX_DEPTH 16
#define MAX_NUMBER 9 /* digits of one that is a slot */

enum { NUMBER = 1, TEXT, MESSAGES };

/* shapes.KINDS */
#define KIND(name, kind) {name, sizeof name - 1, kind}
static const struct {
    const char *name;
    size_t size;
    int kind;
} KINDS[] = {KIND("max_tokens", NUMBER), KIND("max_completion_tokens", NUMBER), KIND("seed", NUMBER), KIND("prompt", TEXT),
    KIND("user", TEXT), KIND("messages", MESSAGES)};
#undef KIND

static const char *space_end(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

/* Behind a number without exponent, of few digits. */
static const char *number_end(const char *at, const char *end)
{
    at = integer_end(at, end, 1);
    if (at == NULL || at == end || *at != '.')
        return at;
    const char *from = ++at;
    while (at < end && is_digit(*at))
        at++;
    return at == from || at - from > MAX_INTEGER ? NULL : at;
}

/* Behind a value; NULL: Python's case. */
static const char *value_end(const char *at, const char *end, int depth)
{
    if (at == end)
        return NULL;
    switch (*at) {
    case '"':
        return string_end(at, end, 0);
    case 't':
        return word_end(at, end, "true");
    case 'f':
        return word_end(at, end, "false");
    case 'n':
        return word_end(at, end, "null");
    case '[':
    case '{':
        break;
    default:
        at = number_end(at, end);
        return at == end || at == NULL || strchr(",]} \n\r\t", *at) == NULL ? NULL : at;
    }
    char object = *at == '{', last = object ? '}' : ']';
    if (depth == MAX_DEPTH)
        return NULL;
    at = space_end(at + 1, end);
    if (at < end && *at == last)
        return at + 1;
    for (;;) {
        if (object) {
            if ((at = string_end(at, end, 0)) == NULL || (at = space_end(at, end)) == end || *at != ':')
                return NULL;
            at = space_end(at + 1, end);
        }
        if ((at = value_end(at, end, depth + 1)) == NULL || (at = space_end(at, end)) == end)
            return NULL;
        if (*at == last)
            return at + 1;
        if (*at != ',')
            return NULL;
        at = space_end(at + 1, end);
    }
}

/* Whether messages may have parts that are not text: `ways.has_parts`. */
static int has_parts(const char *at, const char *end)
{
    static const char *const words[] = {"image_", "input_", "audio", "video", "file\"", "thinking\"", "refusal\""};
    while (at < end && (at = memchr(at, '"', (size_t)(end - at))) != NULL) {
        at++;
        for (size_t i = 0; at < end && i < sizeof words / sizeof *words; i++)
            if (*at == *words[i] && word_end(at, end, words[i]) != NULL)
                return 1;
    }
    return 0;
}

/* `shapes.slots_of` of one field; its value is JSON. */
static int is_slot(const char *name, size_t size, const char *at, const char *end)
{
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
        if (KINDS[i].size != size || memcmp(KINDS[i].name, name, size) != 0)
            continue;
        if (KINDS[i].kind == TEXT)
            return *at == '"';
        if (KINDS[i].kind == MESSAGES)
            return *at == '[' && !has_parts(at, end);
        if (end - at > MAX_NUMBER)
            return 0;
        while (at < end && is_digit(*at))
            at++;
        return at == end;
    }
    return 0;
}

typedef struct {
    const char *at;
    size_t size;
} Name;

static int known_name(const Name *names, int count, const char *at, size_t size)
{
    for (int i = 0; i < count; i++)
        if (names[i].size == size && memcmp(names[i].at, at, size) == 0)
            return 1;
    return 0;
}

typedef struct {
    char data[MAX_KEY];
    size_t size, most;
} Key;

static int put_key(Key *key, const char *at, size_t size)
{
    if (size > key->most - key->size)
        return 0;
    memcpy(key->data + key->size, at, size);
    key->size += size;
    return 1;
}

/* Fill the key and the slots. 1: all of it was read; 0: Python's case; -1: error. */
static int read_fields(const char *at, const char *end, Key *key, PyObject *slots)
{
    Name names[MAX_FIELDS];
    const char *piece = at; /* begins what is not in the key yet */
    at = space_end(at, end);
    if (at == end || *at != '{')
        return 0;
    for (int count = 0; count < MAX_FIELDS; count++) {
        const char *name = space_end(at + 1, end), *close = string_end(name, end, 1);
        if (close == NULL || known_name(names, count, name, (size_t)(close - name)))
            return 0;
        names[count] = (Name){name, (size_t)(close - name)};
        at = space_end(close, end);
        if (at == end || *at != ':')
            return 0;
        const char *value = space_end(at + 1, end);
        if ((at = value_end(value, end, 0)) == NULL)
            return 0;
        if (is_slot(name + 1, (size_t)(close - name) - 2, value, at)) {
            PyObject *slot = PyBytes_FromStringAndSize(value, at - value);
            int wrong = slot == NULL ? -1 : PyList_Append(slots, slot);
            Py_XDECREF(slot);
            if (wrong)
                return -1;
            if (!put_key(key, piece, (size_t)(value - piece)) || !put_key(key, "\0", 1)) /* no JSON has that byte */
                return 0;
            piece = at;
        }
        at = space_end(at, end);
        if (at == end || (*at != ',' && *at != '}'))
            return 0;
        if (*at == '}')
            return space_end(at + 1, end) == end && put_key(key, piece, (size_t)(end - piece));
    }
    return 0;
}

static int are_bytes(PyObject *const *those, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyBytes_Check(those[i])) {
            PyErr_SetString(PyExc_TypeError, "bytes are expected");
            return 0;
        }
    return 1;
}

static PyObject *looked(PyObject *ignored, PyObject *const *args, Py_ssize_t count)
{
    Key key;
    (void)ignored;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "looked takes 2 arguments");
    Py_ssize_t most = PyLong_AsSsize_t(args[1]);
    if (!are_bytes(args, 1) || (most == -1 && PyErr_Occurred()))
        return NULL;
    key.size = 0;
    key.most = most < 0 ? 0 : most > MAX_KEY ? MAX_KEY : (size_t)most;
    PyObject *slots = PyList_New(0), *made = NULL;
    if (slots == NULL)
        return NULL;
    const char *at = PyBytes_AsString(args[0]);
    int done = read_fields(at, at + PyBytes_Size(args[0]), &key, slots);
    if (done > 0)
        made = Py_BuildValue("(y#O)", key.data, (Py_ssize_t)key.size, slots);
    Py_DECREF(slots);
    if (done == 0)
        Py_RETURN_NONE;
    return made;
}

/* ---- a leg's message */

/* The part of a body at `i` of its form: the literal, or the value whose number stands there; NULL: error. */
static PyObject *part_at(PyObject *form, Py_ssize_t i, PyObject *values)
{
    PyObject *part = PyTuple_GetItem(form, i);
    if (part != NULL && PyLong_CheckExact(part)) {
        Py_ssize_t number = PyLong_AsSsize_t(part);
        part = number == -1 && PyErr_Occurred() ? NULL : PyTuple_GetItem(values, number);
    }
    return part != NULL && are_bytes(&part, 1) ? part : NULL;
}

static char *put_bytes(char *to, PyObject *bytes)
{
    Py_ssize_t size = PyBytes_Size(bytes);
    memcpy(to, PyBytes_AsString(bytes), (size_t)size);
    return to + size;
}

static PyObject *message(PyObject *ignored, PyObject *const *args, Py_ssize_t given)
{
    char digits[24];
    (void)ignored;
    if (given != 4 || !PyTuple_Check(args[2]) || !PyTuple_Check(args[3]))
        return PyErr_Format(PyExc_TypeError, "message takes bytes, bytes, a tuple and a tuple");
    if (!are_bytes(args, 2))
        return NULL;
    PyObject *before = args[0], *behind = args[1], *form = args[2], *values = args[3];
    Py_ssize_t parts = PyTuple_Size(form), size = 0;
    for (Py_ssize_t i = 0; i < parts; i++) {
        PyObject *part = part_at(form, i, values);
        if (part == NULL)
            return NULL;
        size += PyBytes_Size(part);
    }
    int count = snprintf(digits, sizeof digits, "%zd", size);
    PyObject *made = PyBytes_FromStringAndSize(NULL, PyBytes_Size(before) + count + PyBytes_Size(behind) + size);
    if (made == NULL)
        return NULL;
    char *to = put_bytes(PyBytes_AsString(made), before);
    memcpy(to, digits, (size_t)count);
    to = put_bytes(to + count, behind);
    for (Py_ssize_t i = 0; i < parts; i++)
        to = put_bytes(to, part_at(form, i, values));
    return made;
}

/* ---- the outline of any body */

enum { WITHIN = 0, NAMES, DEPTH }; /* outline.Outline */

/* Behind a string, whatever is in it; `at` is behind its opening quote. NULL: it has no end. */
static const char *any_string_end(const char *at, const char *end)
{
    for (const char *from = at; (at = memchr(at, '"', (size_t)(end - at))) != NULL; at++) {
        const char *slash = at;
        while (slash > from && slash[-1] == '\\')
            slash--;
        if ((at - slash) % 2 == 0)
            return at + 1;
        from = at + 1; /* that quote was escaped: what stands before it escapes nothing behind it */
    }
    return NULL;
}

static int outline_of(const char *at, const char *end, Py_ssize_t names, Py_ssize_t depth)
{
    Py_ssize_t level = 1;
    at = space_end(at, end);
    if (at == end || *at != '{')
        return WITHIN;
    if (depth < 1)
        return DEPTH;
    for (at++; at < end; at++)
        switch (*at) {
        case '"':
            if ((at = any_string_end(at + 1, end)) == NULL)
                return WITHIN;
            at--;
            break;
        case ',':
            if (level == 1 && --names < 1)
                return NAMES;
            break;
        case '[':
        case '{':
            if (++level > depth)
                return DEPTH;
            break;
        case ']':
        case '}':
            if (--level == 0)
                return WITHIN;
            break;
        default:
            break;
        }
    return WITHIN;
}

static PyObject *judged(PyObject *ignored, PyObject *const *args, Py_ssize_t count)
{
    (void)ignored;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "judged takes 3 arguments");
    Py_ssize_t names = PyLong_AsSsize_t(args[1]), depth = names == -1 && PyErr_Occurred() ? -1 : PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || !are_bytes(args, 1))
        return NULL;
    const char *at = PyBytes_AsString(args[0]);
    return PyLong_FromLong(outline_of(at, at + PyBytes_Size(args[0]), names, depth));
}

static PyMethodDef methods[] = {
    {"judged", (PyCFunction)(void (*)(void))judged, METH_FASTCALL,
     "judged(body, names, depth): as outline.judged."},
    {"message", (PyCFunction)(void (*)(void))message, METH_FASTCALL,
     "message(before, behind, form, values): as shapes.message."},
    {"looked", (PyCFunction)(void (*)(void))looked, METH_FASTCALL,
     "looked(body, most): (key, slots) of a body, as shapes.looked: all but the slots, and their values. None: a case for Python."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_shape", "Shapes of requests.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__shape(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddIntConstant(made, "REVISION", REVISION) < 0)
        Py_CLEAR(made);
    return made;
}
