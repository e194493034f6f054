/* Records that are sealed with AES-256-GCM by the libcrypto of this machine, which is opened at run time.
 *
 *     nonce = count u64, little endian | 0 u32        of the record in its direction; a key has one direction
 *     key'  = what the key makes of 32 zeros under the nonce of ones, every REKEY_AFTER records (REKEY of the Noise protocol)
 *
 * GCM is of NIST SP 800-38D. Its 2^32 blocks and more under one key are why keys are replaced: 65,536 records of at most
 * 64 KiB are 2^28. What is declared here is the same in OpenSSL 1.1 and 3. No sockets, and nothing of Python's here.
 */
#ifndef XPYD_AEAD_H
#define XPYD_AEAD_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TAG 16
#define NONCE 12
#define AEAD_KEY 32
#define REKEY_AFTER ((uint64_t)1 << 16)
#define GET_TAG 0x10 /* EVP_CTRL_AEAD_GET_TAG */
#define SET_TAG 0x11

typedef struct evp_cipher_ctx_st EvpContext;
typedef struct evp_cipher_st EvpCipher;

static struct {
    void *library; /* NULL: none was found */
    EvpContext *(*make)(void);
    void (*free)(EvpContext *);
    const EvpCipher *(*cipher)(void);
    int (*init)(EvpContext *, const EvpCipher *, void *, const unsigned char *key, const unsigned char *nonce, int seals);
    int (*update)(EvpContext *, unsigned char *to, int *size, const unsigned char *from, int from_size);
    int (*finish)(EvpContext *, unsigned char *to, int *size);
    int (*control)(EvpContext *, int what, int size, void *with);
    void (*forget_errors)(void);
} evp;

/* One direction of a stripe, at one end. */
typedef struct {
    EvpContext *context;
    uint64_t count; /* records */
    int seals;      /* else it opens them */
} RecordCipher;

static int make_cipher(RecordCipher *one, const unsigned char *key, int seals)
{
    *one = (RecordCipher){evp.make(), 0, seals};
    return one->context && evp.init(one->context, evp.cipher(), NULL, key, NULL, seals) == 1;
}

static void free_cipher(RecordCipher *one)
{
    if (one->context)
        evp.free(one->context); /* wipes the key, too */
    one->context = NULL;
}

static int next_key(RecordCipher *one)
{
    unsigned char nonce[NONCE], key[AEAD_KEY] = {0};
    int size = 0;
    memset(nonce, 0xff, sizeof nonce);
    int good = evp.init(one->context, NULL, NULL, NULL, nonce, -1) == 1 &&
               evp.update(one->context, key, &size, key, sizeof key) == 1 && size == sizeof key &&
               evp.init(one->context, NULL, NULL, key, NULL, -1) == 1;
    explicit_bzero(key, sizeof key);
    return good;
}

/* The next record begins; 0, here and below: the library cannot do it, or it was not sealed as that record. */
static int begin_record(RecordCipher *one)
{
    unsigned char nonce[NONCE] = {0};
    if (one->count && one->count % REKEY_AFTER == 0 && !next_key(one))
        return 0;
    memcpy(nonce, &one->count, sizeof one->count);
    one->count++;
    return evp.init(one->context, NULL, NULL, NULL, nonce, -1) == 1;
}

static int add_to_record(RecordCipher *one, unsigned char *to, const unsigned char *from, size_t size)
{
    int made = 0;
    return evp.update(one->context, to, &made, from, (int)size) == 1 && (size_t)made == size;
}

/* Write its tag, or check it. Until then nothing that was opened may be used. */
static int end_record(RecordCipher *one, unsigned char *tag)
{
    unsigned char rest[TAG];
    int made = 0;
    int good = (one->seals || evp.control(one->context, SET_TAG, TAG, tag) == 1) &&
               evp.finish(one->context, rest, &made) == 1 && !made &&
               (!one->seals || evp.control(one->context, GET_TAG, TAG, tag) == 1);
    if (!good)
        evp.forget_errors(); /* of this thread's list, which nobody reads */
    return good;
}

/* Seal or open a record where it lies; its tag is behind it. */
static int pass_record(RecordCipher *one, unsigned char *at, size_t size)
{
    return begin_record(one) && add_to_record(one, at, at, size) && end_record(one, at + size);
}

/* Whether it gives the answer that NIST's test of zeros has, and takes no other one. */
static int gives_known_answer(void)
{
    static const unsigned char known[16 + TAG] = {
        0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e, 0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18,
        0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0, 0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19};
    const unsigned char key[AEAD_KEY] = {0}, zeros[16] = {0};
    unsigned char data[16 + TAG] = {0};
    RecordCipher seals = {0}, opens = {0}, other = {0};
    int good = make_cipher(&seals, key, 1) && make_cipher(&opens, key, 0) && make_cipher(&other, key, 0) &&
               pass_record(&seals, data, 16) && !memcmp(data, known, sizeof known) &&
               pass_record(&opens, data, 16) && !memcmp(data, zeros, sizeof zeros);
    memcpy(data, known, sizeof known);
    data[sizeof data - 1] ^= 1;
    good = good && !pass_record(&other, data, 16);
    free_cipher(&seals);
    free_cipher(&opens);
    free_cipher(&other);
    return good;
}

static int find_symbol(void *library, const char *name, void *to)
{
    void *found = dlsym(library, name);
    memcpy(to, &found, sizeof found); /* what POSIX has for pointers to functions */
    return found != NULL;
}

/* Take this library, if none was taken before; whether there is one to be used now. Not on two threads at once. */
static int open_libcrypto(const char *name)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library || evp.library)
        return library != NULL;
    if (find_symbol(library, "EVP_CIPHER_CTX_new", &evp.make) && find_symbol(library, "EVP_CIPHER_CTX_free", &evp.free) &&
        find_symbol(library, "EVP_aes_256_gcm", &evp.cipher) && find_symbol(library, "EVP_CipherInit_ex", &evp.init) &&
        find_symbol(library, "EVP_CipherUpdate", &evp.update) && find_symbol(library, "EVP_CipherFinal_ex", &evp.finish) &&
        find_symbol(library, "EVP_CIPHER_CTX_ctrl", &evp.control) &&
        find_symbol(library, "ERR_clear_error", &evp.forget_errors) && gives_known_answer())
        evp.library = library; /* for good: its threads' memory is freed when they end */
    else
        dlclose(library);
    return evp.library != NULL;
}

#endif
