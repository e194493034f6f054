/* What the machine can do: packed blocks to scattered ones, by memcpy and over one TCP connection, written in C.
 *
 *   raw memcpy BYTES         reads lines "BLOCK BUSY", copies BYTES, answers "SECONDS RIGHT PROCESSOR_SECONDS"
 *   raw send BYTES           says its port, then serves one connection: each u64 that comes asks for BYTES
 *   raw receive BYTES PORT   reads lines "BLOCK BUSY", asks for BYTES, receives each block in its place, answers as above
 *
 * The destination's order is a fixed permutation of its blocks, the same as in the other contenders. With BUSY a thread of
 * each process spins meanwhile, as a Python thread does in the others.
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PIECE ((size_t)1 << 20)
#define IOV 64

static size_t total;
static unsigned char *source, *target;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static volatile int spinning;
static pthread_t spinner;

static void *spin(void *unused) {
    while (spinning) __asm__ volatile("" ::: "memory");
    return unused;
}

static void busy(int on) {
    if (on == spinning) return;
    spinning = on;
    if (on ? pthread_create(&spinner, NULL, spin, NULL) : pthread_join(spinner, NULL)) fail("thread");
}

/* Where block n goes: each of 16 parts has an order of its own; 7919 is prime to every power of two. */
static size_t place(size_t n, size_t block) {
    size_t blocks = total / block, each = blocks < 16 ? 1 : blocks / 16;
    return (n / each * each + n % each * 7919 % each) * block;
}

static int right(size_t block) {
    for (size_t n = 0; n < total / block; n++)
        if (memcmp(target + place(n, block), source + n * block, 64)) return 0;
    return 1;
}

static unsigned char *pool(int fill) {
    unsigned char *memory = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("memory");
    madvise(memory, total, MADV_NOHUGEPAGE); /* as in the other contenders; fails only where there are none */
    if (fill) for (size_t n = 0; n < total; n++) memory[n] = (unsigned char)((n >> 10) * 31 + n);
    else memset(memory, 0, total);
    return memory;
}

static void tune(int fd) {
    int one = 1, size = 1 << 20;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
}

static void receive(int fd, size_t block) {
    size_t blocks = total / block, n = 0, offset = 0;
    while (n < blocks) {
        struct iovec to[IOV];
        size_t count = 0, bytes = 0;
        for (size_t at = n, skip = offset; at < blocks && count < IOV && bytes < PIECE; at++, count++, skip = 0) {
            to[count].iov_base = target + place(at, block) + skip;
            to[count].iov_len = block - skip;
            bytes += block - skip;
        }
        struct msghdr message = {.msg_iov = to, .msg_iovlen = count};
        ssize_t got = recvmsg(fd, &message, MSG_WAITALL);
        if (got <= 0) fail("recvmsg");
        offset += (size_t)got;
        n += offset / block;
        offset %= block;
    }
}

static void lines(int fd) {
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        char *rest;
        size_t block = strtoul(line, &rest, 10);
        uint64_t ask = strtoul(rest, NULL, 10);
        memset(target, 0, total);
        busy((int)ask);
        double began = now(CLOCK_MONOTONIC), used = now(CLOCK_PROCESS_CPUTIME_ID);
        if (fd < 0)
            for (size_t n = 0; n < total / block; n++) memcpy(target + place(n, block), source + n * block, block);
        else {
            if (write(fd, &ask, sizeof ask) != sizeof ask) fail("write");
            receive(fd, block);
        }
        double took = now(CLOCK_MONOTONIC) - began;
        busy(0);
        used = now(CLOCK_PROCESS_CPUTIME_ID) - used;
        printf("%.9f %d %.9f\n", took, right(block), used);
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    total = strtoul(argv[2], NULL, 10);
    source = pool(1);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (!strcmp(argv[1], "memcpy")) {
        target = pool(0);
        puts("0");
        fflush(stdout);
        lines(-1);
    } else if (!strcmp(argv[1], "receive") && argc > 3) {
        target = pool(0);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        address.sin_port = htons((uint16_t)atoi(argv[3]));
        tune(fd);
        if (connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
        puts("0");
        fflush(stdout);
        lines(fd);
    } else {
        int listener = socket(AF_INET, SOCK_STREAM, 0);
        socklen_t size = sizeof address;
        tune(listener);
        if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1)) fail("listen");
        getsockname(listener, (struct sockaddr *)&address, &size);
        printf("%d\n", ntohs(address.sin_port));
        fflush(stdout);
        int fd = accept(listener, NULL, NULL);
        tune(fd);
        for (uint64_t ask; read(fd, &ask, sizeof ask) == sizeof ask; busy(0)) {
            busy((int)ask);
            for (size_t sent = 0; sent < total;) {
                ssize_t got = write(fd, source + sent, total - sent < PIECE ? total - sent : PIECE);
                if (got <= 0) fail("write");
                sent += (size_t)got;
            }
        }
    }
    return 0;
}
