/* The first events of a stream, its rest up to its proper end, or all of it, in one read: noted and rewritten in one call.
 *
 *     e1 CRLF data: {…}\n\n CRLF … e CRLF data: [DONE]\n\n CRLF 0 CRLF CRLF ──▶ what the client gets, and what is noted
 *
 * Belongs here: what `noted.NotedStream.feed` does with such a read while it is spliced to no other stream, for events that
 * have the fields that engines write and nothing else. It takes the read whole or leaves no trace: whatever is unknown,
 * malformed, or means that the engine gave up is a case for Python, which says what is right. Python's stable interface.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>

#include "_chunks.h"
#include "_json.h"

#define REVISION 6 /* the same as in whole.py */

#define MAX_REST 16 /* bytes behind an event's ids, its line ends included, if it is like others */

static const char ENDING[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char DONE[] = "e\r\ndata: [DONE]\n\n\r\n";

static Bytes out, lines; /* used within one call, under the interpreter's lock */

typedef struct {
    const char *at, *end;
    Py_ssize_t count; /* of ids */
} Slice;

/* What events say. */
typedef struct {
    int chat, begun, ended, role, finished, usage;
    Slice id, model; /* of the first event, without quotes */
    long long created;
    Slice prompt;             /* token ids, without brackets; at == NULL: none */
    Slice like;               /* the event to learn from: the first with ids, else the first; at == NULL: none */
    int sure;                 /* it has ids */
} Said;

/* One choice of one event. */
typedef struct {
    Slice text;  /* the text with its quotes, or the whole delta */
    Slice ids;   /* without brackets; at == NULL: none */
    Slice null;  /* the list with its brackets, which the client does not get */
    int says, finished, role, empty;
} Choice;

static void put_slice(Bytes *bytes, Slice slice)
{
    put(bytes, slice.at, (size_t)(slice.end - slice.at));
}

/* A list of token ids: null, or numbers as `integer_end` takes them. `ids` has at == NULL for null. An empty list is Python's. */
static const char *ids_end(const char *at, const char *end, Slice *ids)
{
    const char *next = word_end(at, end, "null");
    if (next != NULL)
        return next;
    if (at >= end || *at != '[')
        return NULL;
    const char *from = ids->at = ++at;
    for (ids->count = 1;; at++) {
        if (at == end)
            return NULL;
        if (is_digit(*at))
            continue;
        if (at == from || at - from > MAX_INTEGER || (*from == '0' && at - from > 1) || (*at != ',' && *at != ']'))
            return NULL;
        if (*at == ']') {
            ids->end = at;
            return at + 1;
        }
        ids->count++;
        from = at + 1;
    }
}

typedef struct {
    const char *name;
    size_t size;
} Name;

#define NAME(word) {word, sizeof word - 1}
#define COUNT(names) (int)(sizeof names / sizeof *names)

/* Which of the names the key at `at` is, with its colon: its number, and `next`; -1: none. `guess` is tried first. */
static int key_of(const char *at, const char *end, const Name *names, int count, int guess, const char **next)
{
    if (end - at < 4 || *at != '"')
        return -1;
    for (int i = 0, which = guess < count ? guess : 0; i < count; i++, which = which + 1 < count ? which + 1 : 0) {
        const Name *name = &names[which];
        if ((size_t)(end - at) > name->size + 3 && at[1] == name->name[0] && at[name->size + 1] == '"'
                && at[name->size + 2] == ':' && memcmp(at + 1, name->name, name->size) == 0) {
            *next = at + name->size + 3;
            return which;
        }
    }
    return -1;
}

/* A string or null: whether it has text. */
static const char *words_end(const char *at, const char *end, int *says)
{
    const char *next = word_end(at, end, "null");
    if (next != NULL)
        return next;
    next = string_end(at, end, 0);
    if (next != NULL && next - at > 2)
        *says = 1;
    return next;
}

static const char *delta_end(const char *at, const char *end, Choice *choice)
{
    static const Name names[] = {NAME("content"), NAME("role"), NAME("reasoning"), NAME("reasoning_content"), NAME("refusal")};
    unsigned seen = 0;
    if (at >= end || *at != '{')
        return NULL;
    choice->text.at = at++;
    choice->empty = at < end && *at == '}';
    if (choice->empty)
        at++;
    else for (;;) {
        int role = 0, key = key_of(at, end, names, COUNT(names), 0, &at);
        if (key < 0 || seen & 1u << key)
            return NULL;
        seen |= 1u << key;
        if ((at = words_end(at, end, key == 1 ? &role : &choice->says)) == NULL || at >= end)
            return NULL;
        choice->role |= role;
        if (*at == '}') {
            at++;
            break;
        }
        if (*at++ != ',')
            return NULL;
    }
    choice->text.end = at;
    return at;
}

static const char *choice_end(const char *at, const char *end, const Said *said, Choice *choice, Slice *prompt)
{
    enum { INDEX, TEXT, DELTA, LOGPROBS, FINISH, STOP, IDS, PROMPT, PROMPT_LOGPROBS };
    static const Name names[] = {NAME("index"), NAME("text"), NAME("delta"), NAME("logprobs"), NAME("finish_reason"),
        NAME("stop_reason"), NAME("token_ids"), NAME("prompt_token_ids"), NAME("prompt_logprobs")};
    int key = -1;
    unsigned seen = 0, needed = 1u << INDEX | 1u << (said->chat ? DELTA : TEXT);
    if (at >= end || *at++ != '{')
        return NULL;
    for (;;) {
        const char *next, *value;
        key = key_of(at, end, names, COUNT(names), key + 1, &value);
        if (key < 0 || seen & 1u << key)
            return NULL;
        seen |= 1u << key;
        switch (key) {
        case INDEX:
            next = word_end(value, end, "0");
            break;
        case TEXT:
            next = said->chat ? NULL : string_end(value, end, 0);
            choice->text = (Slice){value, next, 0};
            choice->says = 1;
            break;
        case DELTA:
            next = said->chat ? delta_end(value, end, choice) : NULL;
            break;
        case FINISH:
            if ((next = word_end(value, end, "null")) == NULL) {
                next = string_end(value, end, 1);
                choice->finished = 1;
                if (word_end(value, end, "\"abort\"") != NULL)
                    return NULL;
            }
            break;
        case STOP:
            if ((next = word_end(value, end, "null")) == NULL && (next = integer_end(value, end, 1)) == NULL)
                next = string_end(value, end, 0);
            break;
        case IDS:
            next = ids_end(value, end, &choice->ids);
            choice->null = (Slice){value, next, 0};
            break;
        case PROMPT:
            if (prompt->at != NULL)
                return NULL;
            next = ids_end(value, end, prompt);
            break;
        default: /* log probabilities are shown to few, and noted otherwise */
            next = word_end(value, end, "null");
        }
        if (next == NULL || next >= end)
            return NULL;
        if (*next == '}')
            return (seen & needed) == needed ? next + 1 : NULL;
        if (*next != ',')
            return NULL;
        at = next + 1;
    }
}

/* An object of integers, null, and at most `deep` further levels of such objects. */
static const char *counts_end(const char *at, const char *end, int deep)
{
    if (at >= end || *at++ != '{')
        return NULL;
    for (;;) {
        const char *next;
        if ((at = string_end(at, end, 1)) == NULL || (at = word_end(at, end, ":")) == NULL)
            return NULL;
        if ((next = word_end(at, end, "null")) == NULL && (next = integer_end(at, end, 0)) == NULL && deep > 0)
            next = counts_end(at, end, deep - 1);
        if (next == NULL || next >= end)
            return NULL;
        if (*next == '}')
            return next + 1;
        if (*next != ',')
            return NULL;
        at = next + 1;
    }
}

/* Whether others can be recognized by this event, as `Scanner.learn` sees it. */
static int may_be_like(const Choice *choice, Slice prompt, const char *end)
{
    static const char behind[] = ",\"logprobs\":null,\"finish_reason\":null,";
    const char *at = choice->text.end;
    int lists = 0;
    if (choice->ids.at < at || end - choice->ids.end > MAX_REST - 1 || word_end(at, end, behind) == NULL)
        return 0;
    for (; at < choice->ids.at; at++)
        lists += *at == '[' && at + 1 != prompt.at;
    return lists == 1;
}

/* The event from `at` to `end` (behind its closing brace): noted, and `out` has its chunk. 0: Python's case; -1: no memory. */
static int take_event(Said *said, const char *at, const char *end)
{
    enum { ID, OBJECT, CREATED, MODEL, CHOICES, USAGE, PROMPT };
    static const Name names[] = {NAME("id"), NAME("object"), NAME("created"), NAME("model"), NAME("choices"), NAME("usage"),
        NAME("prompt_token_ids"), NAME("system_fingerprint"), NAME("service_tier"), NAME("prompt_text")};
    static const unsigned needed = 1u << ID | 1u << CREATED | 1u << MODEL | 1u << CHOICES;
    const char *from = at;
    unsigned seen = 0;
    int key = -1, usage = 0, choices = 0, first = said->model.at == NULL;
    Choice choice = {0};
    long long created = 0;
    Slice id = {0}, model = {0}, prompt = {0};
    if ((at = word_end(at, end, "data: {")) == NULL)
        return 0;
    for (;;) {
        const char *next, *value;
        key = key_of(at, end, names, COUNT(names), key + 1, &value);
        if (key < 0 || seen & 1u << key)
            return 0;
        seen |= 1u << key;
        switch (key) {
        case ID:
            next = string_end(value, end, 1);
            id = (Slice){value + 1, next ? next - 1 : NULL, 0};
            if (next != NULL && next - value == 2)
                return 0;
            break;
        case CREATED:
            next = integer_end(value, end, 0);
            created = strtoll(value, NULL, 10);
            break;
        case MODEL:
            next = string_end(value, end, 1);
            model = (Slice){value + 1, next ? next - 1 : NULL, 0};
            break;
        case CHOICES:
            if ((next = word_end(value, end, "[]")) == NULL && (next = word_end(value, end, "[")) != NULL
                    && (next = choice_end(next, end, said, &choice, &prompt)) != NULL) {
                next = word_end(next, end, "]");
                choices = 1;
            }
            break;
        case USAGE:
            if ((next = word_end(value, end, "null")) == NULL) {
                next = counts_end(value, end, 2);
                usage = 1;
            }
            break;
        case PROMPT:
            if (prompt.at != NULL)
                return 0;
            next = ids_end(value, end, &prompt);
            break;
        default:
            if ((next = word_end(value, end, "null")) == NULL)
                next = string_end(value, end, 1);
        }
        if (next == NULL || next >= end)
            return 0;
        at = next + 1;
        if (*next == '}')
            break;
        if (*next != ',')
            return 0;
    }
    if (at != end || (seen & needed) != needed || (prompt.at != NULL && !first) || (choice.role && (!first || said->begun)))
        return 0;
    if (first && !said->begun) {
        said->id = id;
        said->created = created;
    } else if (created != said->created || id.end - id.at != said->id.end - said->id.at
            || memcmp(id.at, said->id.at, (size_t)(id.end - id.at)) != 0)
        return 0; /* it goes on behind another stream, whose name it gets */
    if (first) {
        said->model = model;
        said->prompt = prompt;
    }
    int dropped = said->chat && choices && choice.empty && !choice.finished; /* made for the ids alone */
    if (said->like.at == NULL && !dropped)
        said->like = (Slice){from, end, 0};
    if (!said->sure && choice.ids.at != NULL && !choice.finished && !dropped) {
        if (!said->ended && !said->begun && !may_be_like(&choice, prompt, end))
            return 0;
        said->like = (Slice){from, end, 0};
        said->sure = 1;
    }
    said->usage |= usage && !choices;
    said->role |= choice.role;
    said->finished |= choice.finished;
    if (choices && (choice.says || choice.ids.at != NULL)) {
        size_t ids = choice.ids.at == NULL ? 0 : (size_t)(choice.ids.end - choice.ids.at) + 1;
        if (reserve(&lines, (size_t)(choice.text.end - choice.text.at) + ids + 1) < 0)
            return -1;
        put_slice(&lines, choice.text);
        if (ids) {
            lines.data[lines.size++] = '\t';
            for (const char *each = choice.ids.at; each < choice.ids.end; each++)
                lines.data[lines.size++] = *each == ',' ? '\t' : *each;
        }
        lines.data[lines.size++] = '\n';
    }
    if (dropped)
        return 1;
    /* The client gets null in the place of both lists. */
    Slice gone[2] = {{0}, {0}};
    int lists = 0;
    if (choice.ids.at != NULL)
        gone[lists++] = choice.null;
    if (prompt.at != NULL)
        gone[lists++] = (Slice){prompt.at - 1, prompt.end + 1, 0};
    if (lists == 2 && gone[1].at < gone[0].at) {
        Slice later = gone[0];
        gone[0] = gone[1];
        gone[1] = later;
    }
    size_t size = (size_t)(end - from) + 2;
    for (int i = 0; i < lists; i++)
        size = size - (size_t)(gone[i].end - gone[i].at) + 4;
    if (reserve(&out, size + 2 * sizeof size + 4) < 0)
        return -1;
    put_size(&out, size);
    for (int i = 0; i < lists; i++) {
        put_slice(&out, (Slice){from, gone[i].at, 0});
        put(&out, "null", 4);
        from = gone[i].end;
    }
    put_slice(&out, (Slice){from, end, 0});
    put(&out, "\n\n\r\n", 4);
    return 1;
}

static PyObject *take(PyObject *ignored, PyObject *const *args, Py_ssize_t count)
{
    Said said = {0};
    Py_ssize_t id;
    (void)ignored;
    if (count != 5 || !PyBytes_Check(args[0]) || !PyUnicode_Check(args[2]) || !PyByteArray_Check(args[4]))
        return PyErr_Format(PyExc_TypeError, "take(data, chat, id, created, log)");
    PyObject *data = args[0], *log = args[4];
    if ((said.chat = PyObject_IsTrue(args[1])) < 0 || (said.id.at = PyUnicode_AsUTF8AndSize(args[2], &id)) == NULL)
        return NULL;
    int overflow;
    said.created = PyLong_AsLongLongAndOverflow(args[3], &overflow);
    if (overflow)
        Py_RETURN_NONE; /* no event that is taken says such a time */
    if (said.created == -1 && PyErr_Occurred())
        return NULL;
    said.id.end = said.id.at + id;
    said.begun = id > 0;
    const char *begin = PyBytes_AsString(data), *at = begin, *end = begin + PyBytes_Size(data);
    const size_t ending = sizeof ENDING - 1;
    said.ended = (size_t)(end - at) >= ending && memcmp(end - ending, ENDING, ending) == 0;
    if (said.ended)
        end -= ending;
    out.size = lines.size = 0;
    if (at == end)
        Py_RETURN_NONE;
    while (at < end) {
        size_t size;
        const char *start = payload_of(at, end, &size);
        if (start == NULL || size < 12 || (size_t)(end - start) < size + 2 || memcmp(start + size - 2, "\n\n\r\n", 4) != 0)
            Py_RETURN_NONE;
        int taken = take_event(&said, start, start + size - 2);
        if (taken < 0)
            return NULL;
        if (!taken)
            Py_RETURN_NONE;
        at = start + size + 2;
    }
    if (reserve(&out, sizeof DONE) < 0)
        return NULL;
    if (said.ended)
        put(&out, DONE, sizeof DONE - 1);
    Py_ssize_t prompt = said.prompt.at == NULL ? 0 : said.prompt.end - said.prompt.at;
    PyObject *made = Py_BuildValue("y#s#Ls#y#iiiinnn", out.data, (Py_ssize_t)out.size,
        said.id.at, (Py_ssize_t)(said.id.end - said.id.at), said.created,
        said.model.at, (Py_ssize_t)(said.model.end - said.model.at), said.prompt.at == NULL ? "" : said.prompt.at, prompt,
        said.role, said.finished, said.usage, said.ended, said.like.at == NULL ? (Py_ssize_t)0 : (Py_ssize_t)(said.like.at - begin),
        said.like.at == NULL ? (Py_ssize_t)0 : (Py_ssize_t)(said.like.end - begin), said.prompt.count);
    if (made == NULL)
        return NULL;
    Py_ssize_t before = PyByteArray_Size(log);
    if (PyByteArray_Resize(log, before + (Py_ssize_t)lines.size) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    if (lines.size)
        memcpy(PyByteArray_AsString(log) + before, lines.data, lines.size);
    return made;
}

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL,
     "take(data, chat, id, created, log): (what the client gets, id, created, model, prompt ids, role, finished, usage, ended,\n"
     "where the event is that is like others, how many ids), and log has what is noted; None: nothing was done."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_answer", "Streams that came in few reads.", -1, methods, NULL, NULL, NULL,
    NULL};

PyMODINIT_FUNC PyInit__answer(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddIntConstant(made, "REVISION", REVISION) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
