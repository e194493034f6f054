/* Reading and writing a socket without waiting.
 *
 * The C library's recv and send are points where a thread may be cancelled, which it prepares and undoes around each call
 * of a process with several threads; no thread here is ever cancelled.
 *
 * To be included after Python.h.
 */
#ifndef XPYD_SOCKET_H
#define XPYD_SOCKET_H

#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As recv: how much came; 0: the end; -1: errno says why not. */
static inline ssize_t read_now(int fd, char *to, size_t room)
{
    ssize_t got;
    do
#ifdef SYS_recvfrom
        got = syscall(SYS_recvfrom, fd, to, room, MSG_DONTWAIT, NULL, NULL);
#else
        got = recv(fd, to, room, MSG_DONTWAIT);
#endif
    while (got < 0 && errno == EINTR);
    return got;
}

/* As send: how much the kernel took; -1: errno says why nothing. */
static inline ssize_t write_now(int fd, const char *from, size_t size)
{
    ssize_t sent;
    do
#ifdef SYS_sendto
        sent = syscall(SYS_sendto, fd, from, size, MSG_NOSIGNAL | MSG_DONTWAIT, NULL, 0);
#else
        sent = send(fd, from, size, MSG_NOSIGNAL | MSG_DONTWAIT);
#endif
    while (sent < 0 && errno == EINTR);
    return sent;
}

#endif
