/* Scripted engines, far cheaper than any router before them: one epoll loop plays all prefill and decode instances.
 *
 *     engine STEP_US prefill PORT … decode PORT …
 *
 * A decode instance gives every stream it has one token per step, as a real engine's batch does, each in a write of its
 * own; so many as the request's max_tokens says, the role chunk included. Chunks are those of vLLM's
 * /v1/chat/completions, with token ids where the request asks for them (return_token_ids).
 * A prefill instance answers at once. A decode leg that names its prefill leg (kv_transfer_params.transfer of xpyd,
 * bootstrap_room of SGLang) begins when that one was answered: no router gains by not waiting for prefill.
 * Not on purpose here: checks of a request beyond what the script needs.
 */
#include "net.h"

#include <sys/timerfd.h>

#define MAX_PORTS 32
#define BUCKETS 65536
#define PROMPT_TOKENS 256

typedef struct Conn Conn;

typedef struct {
    int fd, decodes;
    int timer; /* of a decode instance */
    Conn **streams;
    size_t count, room;
} Instance;

struct Conn {
    int fd, dead;
    Instance *of;
    Buffer in, out;
    size_t at;      /* its place among the streams, while streaming */
    int streaming, waiting;
    int next, total, ids;
    unsigned long long key;
    char id[160];
};

/* A handle in epoll: what happened to what. */
typedef struct {
    enum { LISTENER, TIMER, CONN } kind;
    void *what;
} Handle;

typedef struct Half {
    unsigned long long key;
    Conn *decode; /* NULL: prefill came first */
    struct Half *next;
} Half;

static Half *halves[BUCKETS];
static Instance instances[MAX_PORTS];
static int poll_fd;
static long step_us;
static char prompt_ids[PROMPT_TOKENS * 6 + 3];

static Half **find(unsigned long long key)
{
    Half **at = &halves[key % BUCKETS];
    while (*at && (*at)->key != key)
        at = &(*at)->next;
    return at;
}

static void forget(Half **at)
{
    Half *half = *at;
    *at = half->next;
    free(half);
}

static void remember(unsigned long long key, Conn *decode)
{
    Half **at = find(key);
    if (*at == NULL) {
        if ((*at = calloc(1, sizeof **at)) == NULL)
            fail("memory");
        (*at)->key = key;
    }
    (*at)->decode = decode;
}

static void flush(Conn *conn)
{
    ssize_t sent = send(conn->fd, conn->out.data, conn->out.size, MSG_NOSIGNAL);
    if (sent > 0)
        take(&conn->out, (size_t)sent);
    else if (sent < 0 && errno != EAGAIN)
        conn->dead = 1;
}

/* What a slow reader leaves is kept and sent with the next step. */
static void write_all(Conn *conn, const char *data, size_t size)
{
    if (conn->out.size == 0) {
        ssize_t sent = send(conn->fd, data, size, MSG_NOSIGNAL);
        if (sent == (ssize_t)size)
            return;
        if (sent < 0 && errno != EAGAIN) {
            conn->dead = 1;
            return;
        }
        if (sent > 0)
            data += sent, size -= (size_t)sent;
    }
    add(&conn->out, data, size);
}

static void write_event(Conn *conn, const char *event, size_t size)
{
    char chunk[8192];
    int head = snprintf(chunk, sizeof chunk, "%zx\r\ndata: ", size + 8);
    memcpy(chunk + head, event, size);
    memcpy(chunk + head + size, "\n\n\r\n", 4);
    write_all(conn, chunk, (size_t)head + size + 4);
}

static void write_token(Conn *conn)
{
    char event[4096], ids[32];
    int size, last = ++conn->next == conn->total;
    static const char *head = "{\"id\":\"%s\",\"object\":\"chat.completion.chunk\",\"created\":1763750000,\"model\":\"tiny\","
                              "\"choices\":[{\"index\":0,\"delta\":{%s},\"logprobs\":null,\"finish_reason\":%s";
    if (conn->next == 1) {
        size = snprintf(event, sizeof event, head, conn->id, "\"role\":\"assistant\",\"content\":\"\"", "null");
        size += snprintf(event + size, sizeof event - (size_t)size, "}],\"prompt_token_ids\":%s}",
                         conn->ids ? prompt_ids : "null");
    } else {
        char delta[64];
        snprintf(delta, sizeof delta, "\"content\":\" t%d\"", conn->next - 1);
        snprintf(ids, sizeof ids, conn->ids ? "[%d]" : "null", conn->next - 1);
        size = snprintf(event, sizeof event, head, conn->id, delta, last ? "\"length\",\"stop_reason\":null" : "null");
        size += snprintf(event + size, sizeof event - (size_t)size, ",\"token_ids\":%s}]}", ids);
    }
    write_event(conn, event, (size_t)size);
    if (last) {
        write_event(conn, "[DONE]", 6);
        write_all(conn, "0\r\n\r\n", 5);
    }
}

static void stop_stream(Conn *conn)
{
    Instance *of = conn->of;
    of->streams[conn->at] = of->streams[--of->count];
    of->streams[conn->at]->at = conn->at;
    conn->streaming = 0;
}

static void start_stream(Conn *conn)
{
    static const char head[] = "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
                               "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    Instance *of = conn->of;
    if (of->count == of->room) {
        of->room = of->room * 2 + 64;
        if ((of->streams = realloc(of->streams, of->room * sizeof *of->streams)) == NULL)
            fail("memory");
    }
    conn->at = of->count;
    of->streams[of->count++] = conn;
    conn->streaming = 1;
    conn->waiting = 0;
    conn->next = 0;
    write_all(conn, head, sizeof head - 1);
    write_token(conn);
}

static void whole(Conn *conn, const char *body)
{
    char answer[4096];
    int size = snprintf(answer, sizeof answer, "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
                        "content-length: %zu\r\ncontent-type: application/json\r\n\r\n%s", strlen(body), body);
    write_all(conn, answer, (size_t)size);
}

static unsigned long long number_after(const char *text, const char *name, int base)
{
    char digits[17] = "";
    const char *at = strstr(text, name);
    if (at == NULL)
        return 0;
    strncpy(digits, at + strlen(name), 16);
    return strtoull(digits, NULL, base);
}

static void prefill(Conn *conn, unsigned long long key, const char *body)
{
    if (strstr(body, "\"stream\":true") != NULL) { /* SGLang's routers send both legs as they came */
        conn->total = 1;
        conn->ids = 0;
        start_stream(conn);
        stop_stream(conn);
    } else
        whole(conn, "{\"id\":\"chatcmpl-p\",\"object\":\"chat.completion\",\"created\":1763750000,\"model\":\"tiny\",\"choices\":"
              "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\" t\"},\"logprobs\":null,\"finish_reason\":\"length\"}],"
              "\"usage\":{\"prompt_tokens\":256,\"total_tokens\":257,\"completion_tokens\":1},\"kv_transfer_params\":"
              "{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_block_ids\":[1,2,3,4],"
              "\"remote_engine_id\":\"e\",\"remote_host\":\"127.0.0.1\",\"remote_port\":5600}}");
    if (!key)
        return;
    Half **at = find(key);
    if (*at && (*at)->decode) {
        Conn *decode = (*at)->decode;
        forget(at);
        start_stream(decode);
    } else
        remember(key, NULL);
}

static void decode(Conn *conn, unsigned long long key, const char *head, const char *body)
{
    const char *id = strcasestr(head, "\r\nx-request-id:");
    conn->total = (int)number_after(body, "\"max_tokens\":", 10);
    if (!conn->total) /* as sglang-router spells it */
        conn->total = (int)number_after(body, "\"max_completion_tokens\":", 10);
    conn->ids = strstr(body, "\"return_token_ids\":true") != NULL;
    snprintf(conn->id, sizeof conn->id, "chatcmpl-%.*s", id ? (int)strcspn(id + 16, "\r") : 32,
             id ? id + 16 : "0123456789abcdef0123456789abcdef");
    if (conn->total < 2) {
        fprintf(stderr, "engine: a decode leg without max_tokens above 1: %s\n", body);
        exit(1);
    }
    if (key) {
        Half **at = find(key);
        if (*at == NULL || (*at)->decode) {
            conn->waiting = 1;
            conn->key = key;
            remember(key, conn);
            return;
        }
        forget(at);
    }
    start_stream(conn);
}

static void ended(Conn *conn)
{
    if (conn->streaming)
        stop_stream(conn);
    if (conn->waiting) {
        Half **at = find(conn->key);
        if (*at && (*at)->decode == conn)
            forget(at);
    }
    close(conn->fd);
    free(conn->in.data);
    free(conn->out.data);
    free(conn);
}

/* One whole request, if there is one; 0: there is none, -1: it is none that is understood. */
static int request(Conn *conn)
{
    char *end = conn->in.size ? strstr(conn->in.data, "\r\n\r\n") : NULL;
    if (end == NULL)
        return 0;
    *end = 0;
    const char *length = strcasestr(conn->in.data, "\r\ncontent-length:");
    size_t size = length ? strtoul(length + 17, NULL, 10) : 0;
    int get = strncmp(conn->in.data, "GET ", 4) == 0;
    if (!get && length == NULL) /* a router that asks whether HTTP/2 is spoken here */
        return -1;
    size_t head = (size_t)(end + 4 - conn->in.data);
    if (conn->in.size < head + size) {
        *end = '\r';
        return 0;
    }
    const char *body = end + 4;
    char after = end[4 + size];
    end[4 + size] = 0;
    if (get)
        whole(conn, strstr(conn->in.data, " /v1/models ") ? "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\"}]}"
                    : "{\"model_path\":\"tiny\",\"served_model_name\":\"tiny\",\"status\":\"ready\",\"is_generation\":true}");
    else {
        unsigned long long key = number_after(body, "\"transfer\":\"", 16);
        if (!key)
            key = number_after(body, "\"bootstrap_room\":", 10);
        if (conn->of->decodes)
            decode(conn, key, conn->in.data, body);
        else
            prefill(conn, key, body);
    }
    end[4 + size] = after;
    take(&conn->in, head + size);
    return 1;
}

static void step(Instance *of)
{
    for (size_t at = of->count; at-- > 0;) {
        Conn *conn = of->streams[at];
        if (conn->out.size)
            flush(conn);
        if (conn->out.size || conn->dead) /* the end of a dead one is read */
            continue;
        write_token(conn);
        if (conn->next == conn->total)
            stop_stream(conn);
    }
}

static void accept_all(Instance *of)
{
    int fd;
    while ((fd = accept4(of->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        Conn *conn = calloc(1, sizeof *conn);
        Handle *handle = calloc(1, sizeof *handle);
        if (!conn || !handle)
            fail("memory");
        no_delay(fd);
        conn->fd = fd;
        conn->of = of;
        handle->kind = CONN;
        handle->what = conn;
        watch(poll_fd, fd, EPOLLIN, handle);
    }
}

static void add_instance(Instance *of, int port, int decodes)
{
    static Handle handles[MAX_PORTS * 2];
    static int used;
    struct sockaddr_in address = loopback(port);
    int one = 1;
    of->decodes = decodes;
    of->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(of->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(of->fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(of->fd, 4096) < 0)
        fail("listen");
    handles[used] = (Handle){LISTENER, of};
    watch(poll_fd, of->fd, EPOLLIN, &handles[used++]);
    if (!decodes)
        return;
    struct timespec every = {step_us / 1000000, step_us % 1000000 * 1000};
    struct itimerspec when = {.it_interval = every, .it_value = every};
    of->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    timerfd_settime(of->timer, 0, &when, NULL);
    handles[used] = (Handle){TIMER, of};
    watch(poll_fd, of->timer, EPOLLIN, &handles[used++]);
}

static void read_conn(Handle *handle)
{
    static char bytes[READ_SIZE];
    Conn *conn = handle->what;
    ssize_t got = recv(conn->fd, bytes, sizeof bytes, 0);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        ended(conn);
        free(handle);
        return;
    }
    add(&conn->in, bytes, (size_t)got);
    int more;
    while ((more = request(conn)) > 0)
        ;
    if (more < 0) {
        ended(conn);
        free(handle);
    }
}

int main(int argc, char **argv)
{
    int decodes = 0, count = 0, size = 0;
    if (argc < 4 || (step_us = atol(argv[1])) <= 0) {
        fprintf(stderr, "engine STEP_US prefill PORT ... decode PORT ...\n");
        return 2;
    }
    for (int i = 0; i < PROMPT_TOKENS; i++)
        size += sprintf(prompt_ids + size, "%c%d", i ? ',' : '[', 100 + i * 7);
    strcpy(prompt_ids + size, "]");
    poll_fd = epoll_create1(0);
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "prefill") == 0 || strcmp(argv[i], "decode") == 0)
            decodes = argv[i][0] == 'd';
        else if (count < MAX_PORTS)
            add_instance(&instances[count++], atoi(argv[i]), decodes);
    }
    for (;;) {
        struct epoll_event events[256];
        int found = epoll_wait(poll_fd, events, 256, -1);
        for (int i = 0; i < found; i++) {
            Handle *handle = events[i].data.ptr;
            unsigned long long turns;
            if (handle->kind == LISTENER)
                accept_all(handle->what);
            else if (handle->kind == CONN)
                read_conn(handle);
            else if (read(((Instance *)handle->what)->timer, &turns, sizeof turns) > 0)
                step(handle->what); /* turns that were missed are not made up for */
        }
    }
}
