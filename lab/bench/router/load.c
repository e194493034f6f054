/* Clients of a router: streams with keep-alive, each answer checked token by token.
 *
 *     load PORT STREAMS REQUESTS CHUNKS SPREAD_US LIMIT_S < REQUEST
 *
 * REQUEST is a whole HTTP request. STREAMS connections are made first; the streams begin over SPREAD_US and each begins
 * anew when it has ended, until REQUESTS have begun. Prints one JSON object: how many failed and the first reason,
 * times to the first event in µs (quartiles), seconds from the first request to the last answer.
 * An answer is right if its status is 200, its tokens are 1, 2, … CHUNKS - 1 after the role chunk, [DONE] and a proper end
 * follow, and no list of token ids is in it.
 */
#include "net.h"

#define MAX_LINE 16384

typedef struct {
    int fd;
    long long begins, sent;
    int busy, head, done, tokens;
    long left;  /* of the chunk, its line end included; -1: a size line is next */
    int trailer;
    Buffer in;  /* head and size lines */
    Buffer line;
} Stream;

static int streams, requests, chunks, begun, over, failed, live;
static long long spread_us;
static Buffer request;
static long *firsts;
static int first_count;
static char reason[200];
static int poll_fd, port;

static void open_stream(Stream *stream)
{
    struct sockaddr_in address = loopback(port);
    stream->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(stream->fd, (struct sockaddr *)&address, sizeof address) < 0)
        fail("connect");
    no_delay(stream->fd);
    watch(poll_fd, stream->fd, EPOLLIN, stream);
}

static void begin(Stream *stream)
{
    stream->busy = 1;
    stream->head = stream->done = stream->tokens = stream->trailer = 0;
    stream->left = -1;
    stream->in.size = stream->line.size = 0;
    begun++;
    live++;
    stream->sent = now_us();
    if (send(stream->fd, request.data, request.size, MSG_NOSIGNAL) != (ssize_t)request.size)
        fail("send"); /* a request is far smaller than a socket's buffer */
}

static void finish(Stream *stream, const char *wrong)
{
    over++;
    live--;
    stream->busy = 0;
    if (wrong) {
        if (!failed++)
            snprintf(reason, sizeof reason, "%s", wrong);
        close(stream->fd);
        open_stream(stream);
    }
    if (begun < requests)
        begin(stream);
}

/* One line of the event stream; what is wrong with it, or NULL. */
static const char *on_line(Stream *stream, const char *line)
{
    char token[32];
    if (!*line)
        return NULL;
    if (stream->done)
        return "something behind [DONE]";
    if (strncmp(line, "data: ", 6) != 0)
        return "a line that is no data";
    if (strcmp(line + 6, "[DONE]") == 0) {
        stream->done = 1;
        return stream->tokens == chunks ? NULL : "[DONE] too early";
    }
    if (strstr(line, "token_ids\":["))
        return "token ids that nobody asked for";
    if (stream->tokens == 0) {
        firsts[first_count++] = (long)(now_us() - stream->sent);
        snprintf(token, sizeof token, "\"content\":\"\"");
    } else
        snprintf(token, sizeof token, "\"content\":\" t%d\"", stream->tokens);
    stream->tokens++;
    return strstr(line, token) ? NULL : "a token that is not the next one";
}

static const char *on_body(Stream *stream, const char *data, size_t size)
{
    while (size) {
        const char *end = memchr(data, '\n', size);
        size_t part = end ? (size_t)(end - data) : size;
        if (stream->line.size + part > MAX_LINE)
            return "a line that does not end";
        add(&stream->line, data, part);
        if (!end)
            return NULL;
        const char *wrong = on_line(stream, stream->line.data);
        if (wrong)
            return wrong;
        stream->line.size = 0;
        data += part + 1;
        size -= part + 1;
    }
    return NULL;
}

/* Takes the head and chunk framing off; 1: the answer is over, 0: more is to come, -1: wrong, see *wrong. */
static int on_bytes(Stream *stream, const char *data, size_t size, const char **wrong)
{
    while (size) {
        if (stream->left > 0) {
            size_t part = size < (size_t)stream->left ? size : (size_t)stream->left;
            long body = stream->left - 2; /* without the chunk's line end */
            if (body > 0 && (*wrong = on_body(stream, data, (long)part < body ? part : (size_t)body)))
                return -1;
            stream->left -= (long)part;
            if (stream->left == 0)
                stream->left = -1;
            data += part;
            size -= part;
            continue;
        }
        const char *end = memchr(data, '\n', size);
        size_t part = end ? (size_t)(end - data) + 1 : size;
        add(&stream->in, data, part);
        data += part;
        size -= part;
        if (!end)
            continue;
        int empty = stream->in.size == 2;
        if (!stream->head) { /* lines of the head are gathered */
            if (stream->in.size < 4 || strcmp(stream->in.data + stream->in.size - 4, "\r\n\r\n") != 0)
                continue;
            if (strncmp(stream->in.data, "HTTP/1.1 200 ", 13) != 0) {
                static char words[160];
                snprintf(words, sizeof words, "the answer %.100s", stream->in.data);
                words[strcspn(words, "\r")] = 0;
                *wrong = words;
                return -1;
            }
            if (strcasestr(stream->in.data, "transfer-encoding: chunked") == NULL) {
                *wrong = "an answer that is not chunked";
                return -1;
            }
            stream->head = 1;
        } else if (stream->trailer) {
            if (!empty)
                continue;
            *wrong = size ? "bytes behind the answer" : stream->done ? NULL : "an end without [DONE]";
            return *wrong ? -1 : 1;
        } else {
            long length = strtol(stream->in.data, NULL, 16);
            stream->trailer = length == 0;
            stream->left = length ? length + 2 : -1;
        }
        stream->in.size = 0;
    }
    return 0;
}

static void on_readable(Stream *stream)
{
    static char bytes[READ_SIZE];
    const char *wrong = NULL;
    ssize_t got = recv(stream->fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        if (stream->busy)
            finish(stream, "the connection ended");
        else {
            close(stream->fd);
            open_stream(stream);
        }
        return;
    }
    if (!stream->busy)
        return;
    int end = on_bytes(stream, bytes, (size_t)got, &wrong);
    if (end)
        finish(stream, end < 0 ? wrong : NULL);
}

static int by_size(const void *one, const void *other)
{
    long a = *(const long *)one, b = *(const long *)other;
    return (a > b) - (a < b);
}

static long quartile(int which)
{
    return first_count ? firsts[(long)(first_count - 1) * which / 4] : -1;
}

int main(int argc, char **argv)
{
    if (argc != 7) {
        fprintf(stderr, "load PORT STREAMS REQUESTS CHUNKS SPREAD_US LIMIT_S < REQUEST\n");
        return 2;
    }
    port = atoi(argv[1]);
    streams = atoi(argv[2]);
    requests = atoi(argv[3]);
    chunks = atoi(argv[4]);
    spread_us = atoll(argv[5]);
    char bytes[READ_SIZE];
    for (ssize_t got; (got = read(0, bytes, sizeof bytes)) > 0;)
        add(&request, bytes, (size_t)got);
    firsts = calloc((size_t)requests + 1, sizeof *firsts);
    Stream *all = calloc((size_t)streams, sizeof *all);
    if (!firsts || !all)
        fail("memory");
    poll_fd = epoll_create1(0);
    for (int i = 0; i < streams; i++)
        open_stream(&all[i]);
    long long start = now_us(), limit = start + atoll(argv[6]) * 1000000;
    int first = 0;
    while (over < requests) {
        struct epoll_event events[256];
        while (first < streams && begun < requests && now_us() - start >= spread_us * first / streams)
            begin(&all[first++]);
        int found = epoll_wait(poll_fd, events, 256, first < streams ? 1 : 100);
        for (int i = 0; i < found; i++)
            on_readable(events[i].data.ptr);
        if (now_us() > limit) {
            failed += requests - over;
            if (!*reason)
                snprintf(reason, sizeof reason, "%d answers not within %s s", requests - over, argv[6]);
            break;
        }
    }
    double seconds = (double)(now_us() - start) / 1e6;
    qsort(firsts, (size_t)first_count, sizeof *firsts, by_size);
    for (char *at = reason; *at; at++)
        if (*at == '"' || *at == '\\' || (unsigned char)*at < 32)
            *at = '\'';
    printf("{\"requests\":%d,\"failed\":%d,\"reason\":\"%s\",\"first_us\":[%ld,%ld,%ld],\"seconds\":%.3f}\n", requests, failed,
           reason, quartile(1), quartile(2), quartile(3), seconds);
    return 0;
}
