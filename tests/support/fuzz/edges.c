/* Which ways through an extension a call took: linked into each that is built for the fuzz, and called for each basic block.
 *
 *     cc -fsanitize-coverage=trace-pc extension.c coverage.o ──▶ __sanitizer_cov_trace_pc() at each block
 *     coverage_begin()      forget what was taken
 *     coverage_news()       how much of what was taken since then had never been taken before, which is known from now on
 *     coverage_edges()      how many ways are known
 *
 * A way is a pair of blocks, one after the other in a thread, and about how often it was taken: 1, 2, 3, 4-7, 8-15, 16-31,
 * 32-127, or more times. Pairs share a place now and then; nothing but thoroughness suffers. Threads of an extension count
 * into the same map without a lock, and may lose a count.
 */
#include <stdint.h>
#include <stddef.h>

#define SIZE (1 << 16)
#define EXPORTED __attribute__((visibility("default")))

extern const char __ehdr_start[] __attribute__((visibility("hidden"))); /* where this library lies: addresses are relative to it */

static uint8_t taken[SIZE], known[SIZE];
static uint32_t places[SIZE], edges; /* places: those in `taken` that are not 0 */
static volatile uint32_t many;
static _Thread_local uint32_t before;

void __sanitizer_cov_trace_pc(void);

void __sanitizer_cov_trace_pc(void)
{
    uint32_t at = (uint32_t)((uintptr_t)__builtin_return_address(0) - (uintptr_t)__ehdr_start) * 0x9E3779B1u >> 16;
    uint32_t place = (at ^ before) & (SIZE - 1);
    before = at >> 1;
    if (taken[place] == 0) {
        uint32_t n = many;
        if (n < SIZE) {
            places[n] = place;
            many = n + 1;
        }
    }
    if (taken[place] < 255)
        taken[place]++;
}

EXPORTED void coverage_begin(void)
{
    uint32_t n = many;
    while (n--)
        taken[places[n]] = 0;
    many = 0;
    before = 0;
}

EXPORTED uint32_t coverage_news(void)
{
    uint32_t news = 0;
    for (uint32_t n = 0; n < many; n++) {
        uint8_t count = taken[places[n]], *all = &known[places[n]];
        uint8_t bit = count < 4 ? 1 << (count - (count > 0)) : count < 8 ? 8 : count < 16 ? 16 : count < 32 ? 32 : count < 128 ? 64 : 128;
        if (*all & bit)
            continue;
        edges += *all == 0;
        *all |= bit;
        news++;
    }
    return news;
}

EXPORTED uint32_t coverage_edges(void)
{
    return edges;
}
