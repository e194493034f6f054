/* What engine.c and load.c share: sockets, time, growing buffers. Faults of this machine end the program with one line. */
#ifndef XPYD_BENCH_NET_H
#define XPYD_BENCH_NET_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define READ_SIZE 65536

typedef struct {
    char *data;
    size_t size, room;
} Buffer;

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static inline long long now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

/* One byte more than asked for is kept, so that the data can be ended with a zero and searched as text. */
static void add(Buffer *buffer, const char *data, size_t size)
{
    if (buffer->size + size + 1 > buffer->room) {
        buffer->room = (buffer->size + size + 1) * 2;
        if ((buffer->data = realloc(buffer->data, buffer->room)) == NULL)
            fail("memory");
    }
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
    buffer->data[buffer->size] = 0;
}

static inline void take(Buffer *buffer, size_t size)
{
    memmove(buffer->data, buffer->data + size, buffer->size - size + 1);
    buffer->size -= size;
}

static struct sockaddr_in loopback(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void no_delay(int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static void watch(int poll, int fd, unsigned events, void *whose)
{
    struct epoll_event event = {.events = events, .data.ptr = whose};
    if (epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) < 0)
        fail("epoll_ctl");
}

#endif
