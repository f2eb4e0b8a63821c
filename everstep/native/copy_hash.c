/* Copies memory and makes its xxh3-128 in the same pass, at the speed of a copy; and makes weighted sums of it.
 *
 * A copy of more than the caches hold waits for memory and leaves the arithmetic units idle: to hash what has just been
 * loaded costs next to nothing there, where a pass of its own reads everything once more. Where the target is aligned,
 * stores go past the caches, which saves reading what is overwritten.
 *
 * The digest is XXH3 with 128 bits, seed 0 and the default secret, of inputs longer than 240 bytes, by its specification
 * (doc/xxhash_spec.md of github.com/Cyan4973/xxHash): stripes of 64 bytes are folded into eight lanes, which are
 * scrambled after every 16 of them; the last 64 bytes are folded once more. Shorter inputs need none of this.
 *
 * For x86-64 with AVX2 alone; everstep_usable says whether this machine is one.
 */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2")))
#define STRIPE 64
#define STRIPES_IN_BLOCK 16 /* (sizeof secret - STRIPE) / 8 */
#define PREFETCH 1024       /* bytes ahead */
#define PAST_CACHES 4096    /* bytes: of less the target is as likely to be read again soon */

static const uint8_t secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t prime64[6] = {
    0, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
};
#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define AVALANCHE 0x165667919E3779F9u

typedef struct {
    uint64_t lanes[8];
    uint64_t total;
    uint32_t stripes;        /* folded since the lanes were scrambled */
    uint32_t waiting;        /* bytes in pending: which stripe is the last is not known before the end */
    uint8_t last[2 * STRIPE]; /* the stripe that was folded last, and what is pending behind it */
} State;

int everstep_usable(void) { return __builtin_cpu_supports("avx2") != 0; }

static uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* --- lanes: two registers of four --- */

#define FOLD(lanes, data, key)                                                                                        \
    do {                                                                                                              \
        __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)(key)));                           \
        __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));                                      \
        __m256i neighbour = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));                                      \
        lanes = _mm256_add_epi64(product, _mm256_add_epi64(lanes, neighbour));                                        \
    } while (0)

AVX2 static inline __m256i scrambled(__m256i lanes, const uint8_t *key) {
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, _mm256_loadu_si256((const __m256i *)key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

enum { HASH, STORE, STREAM };

/* Folds whole stripes, and stores them at target: not at all, anyhow, or past the caches (target at a multiple of 32). */
AVX2 static inline __attribute__((always_inline)) void fold_as(
    State *state, uint8_t *target, const uint8_t *source, size_t stripes, int how) {
    __m256i low = _mm256_loadu_si256((const __m256i *)state->lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(state->lanes + 4));
    uint32_t in_block = state->stripes;
    for (size_t i = 0; i < stripes; i++, source += STRIPE, target += how == HASH ? 0 : STRIPE) {
        __m256i first = _mm256_loadu_si256((const __m256i *)source);
        __m256i second = _mm256_loadu_si256((const __m256i *)(source + 32));
        _mm_prefetch((const char *)source + PREFETCH, _MM_HINT_T0);
        FOLD(low, first, secret + 8 * in_block);
        FOLD(high, second, secret + 8 * in_block + 32);
        if (how == STORE) {
            _mm256_storeu_si256((__m256i *)target, first);
            _mm256_storeu_si256((__m256i *)(target + 32), second);
        } else if (how == STREAM) {
            _mm256_stream_si256((__m256i *)target, first);
            _mm256_stream_si256((__m256i *)(target + 32), second);
        }
        if (++in_block == STRIPES_IN_BLOCK) {
            low = scrambled(low, secret + sizeof secret - STRIPE);
            high = scrambled(high, secret + sizeof secret - STRIPE + 32);
            in_block = 0;
        }
    }
    if (how == STREAM)
        _mm_sfence();
    state->stripes = in_block;
    _mm256_storeu_si256((__m256i *)state->lanes, low);
    _mm256_storeu_si256((__m256i *)(state->lanes + 4), high);
}

AVX2 static void fold(State *state, uint8_t *target, const uint8_t *source, size_t stripes) {
    if (target == NULL)
        fold_as(state, NULL, source, stripes, HASH);
    else if ((uintptr_t)target % 32 == 0 && stripes * STRIPE >= PAST_CACHES)
        fold_as(state, target, source, stripes, STREAM);
    else
        fold_as(state, target, source, stripes, STORE);
}

static void begin(State *state) {
    const uint64_t lanes[8] = {
        PRIME32_3, prime64[1], prime64[2], prime64[3], prime64[4], PRIME32_2, prime64[5], PRIME32_1,
    };
    memset(state, 0, sizeof *state);
    memcpy(state->lanes, lanes, sizeof lanes);
}

/* Hashes what follows what was hashed before, and copies it to target, unless that is NULL. */
AVX2 static void update(State *state, uint8_t *target, const uint8_t *source, size_t length) {
    uint8_t *pending = state->last + STRIPE;
    state->total += length;
    while (length > 0) {
        if (state->waiting == STRIPE) { /* and it is not the last */
            fold(state, NULL, pending, 1);
            memcpy(state->last, pending, STRIPE);
            state->waiting = 0;
        }
        if (state->waiting == 0 && length > STRIPE) {
            size_t stripes = (length - 1) / STRIPE;
            fold(state, target, source, stripes);
            source += stripes * STRIPE;
            target += target == NULL ? 0 : stripes * STRIPE;
            length -= stripes * STRIPE;
            memcpy(state->last, source - STRIPE, STRIPE);
        }
        size_t some = STRIPE - state->waiting < length ? STRIPE - state->waiting : length;
        memcpy(pending + state->waiting, source, some);
        if (target != NULL) {
            memcpy(target, source, some);
            target += some;
        }
        state->waiting += (uint32_t)some;
        source += some;
        length -= some;
    }
}

static uint64_t folded_product(uint64_t left, uint64_t right) {
    unsigned __int128 product = (unsigned __int128)left * right;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t *lanes, const uint8_t *key, uint64_t start) {
    for (int i = 0; i < 4; i++)
        start += folded_product(lanes[2 * i] ^ word(key + 16 * i), lanes[2 * i + 1] ^ word(key + 16 * i + 8));
    start ^= start >> 37;
    start *= AVALANCHE;
    return start ^ (start >> 32);
}

/* The digest in its canonical form, the high half first and big-endian. The state is of no more use. */
AVX2 static void finish(State *state, uint8_t *digest) {
    __m256i low = _mm256_loadu_si256((const __m256i *)state->lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(state->lanes + 4));
    const uint8_t *last = state->last + state->waiting; /* the last 64 bytes of all */
    const uint8_t *key = secret + sizeof secret - STRIPE - 7;
    FOLD(low, _mm256_loadu_si256((const __m256i *)last), key);
    FOLD(high, _mm256_loadu_si256((const __m256i *)(last + 32)), key + 32);
    _mm256_storeu_si256((__m256i *)state->lanes, low);
    _mm256_storeu_si256((__m256i *)(state->lanes + 4), high);
    uint64_t halves[2] = {
        merged(state->lanes, secret + sizeof secret - STRIPE - 11, ~(state->total * prime64[2])),
        merged(state->lanes, secret + 11, state->total * prime64[1]),
    };
    for (int i = 0; i < 16; i++)
        digest[i] = (uint8_t)(halves[i / 8] >> (56 - 8 * (i % 8)));
}

/* --- what is called --- */

/* Hashes source[0, length), more than 240 bytes, and copies parts of it: for each i, count of them in ascending order
 * of from[i], bytes [from[i], from[i] + size[i]), all within length, to the address to[i]. What two parts want is copied
 * twice. */
void everstep_scatter(
    const uint8_t *source, uint64_t length, const int64_t *from, const int64_t *to, const int64_t *size,
    uint64_t count, uint8_t *digest) {
    State state;
    uint64_t hashed = 0;
    begin(&state);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t start = (uint64_t)from[i], end = start + (uint64_t)size[i];
        uint8_t *target = (uint8_t *)(uintptr_t)to[i];
        if (start > hashed) {
            update(&state, NULL, source + hashed, start - hashed);
            hashed = start;
        }
        if (start < hashed) { /* another part's, too */
            uint64_t again = (end < hashed ? end : hashed) - start;
            memcpy(target, source + start, again);
            target += again;
            start += again;
        }
        if (end > start) {
            update(&state, target, source + start, end - start);
            hashed = end;
        }
    }
    update(&state, NULL, source + hashed, length - hashed);
    finish(&state, digest);
}

/* Fills target[0, length), more than 240 bytes, from parts, and hashes it: for each i, count of them in ascending order
 * of to[i] and disjoint, size[i] bytes of the address from[i] go to target + to[i]. What no part fills stays, and is
 * hashed as it is. */
void everstep_gather(
    uint8_t *target, uint64_t length, const int64_t *to, const int64_t *from, const int64_t *size, uint64_t count,
    uint8_t *digest) {
    State state;
    uint64_t filled = 0;
    begin(&state);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t start = (uint64_t)to[i];
        update(&state, NULL, target + filled, start - filled);
        update(&state, target + start, (const uint8_t *)(uintptr_t)from[i], (uint64_t)size[i]);
        filled = start + (uint64_t)size[i];
    }
    update(&state, NULL, target + filled, length - filled);
    finish(&state, digest);
}

/* --- weighted sums --- */

/* Both halves of each word, multiplied with the halves of its weight, added modulo 2^64. */
AVX2 static uint64_t weighted(const uint8_t *data, const uint64_t *weights, uint64_t words) {
    __m256i first = _mm256_setzero_si256(), second = _mm256_setzero_si256();
    uint64_t i = 0, lanes[4], sum = 0;
    for (; i + 8 <= words; i += 8) {
        __m256i left = _mm256_loadu_si256((const __m256i *)(data + 8 * i));
        __m256i right = _mm256_loadu_si256((const __m256i *)(data + 8 * i + 32));
        __m256i left_weight = _mm256_loadu_si256((const __m256i *)(weights + i));
        __m256i right_weight = _mm256_loadu_si256((const __m256i *)(weights + i + 4));
        _mm_prefetch((const char *)data + 8 * i + PREFETCH, _MM_HINT_T0);
        first = _mm256_add_epi64(first, _mm256_mul_epu32(left, left_weight));
        second = _mm256_add_epi64(second, _mm256_mul_epu32(right, right_weight));
        left = _mm256_mul_epu32(_mm256_srli_epi64(left, 32), _mm256_srli_epi64(left_weight, 32));
        right = _mm256_mul_epu32(_mm256_srli_epi64(right, 32), _mm256_srli_epi64(right_weight, 32));
        first = _mm256_add_epi64(first, left);
        second = _mm256_add_epi64(second, right);
    }
    _mm256_storeu_si256((__m256i *)lanes, _mm256_add_epi64(first, second));
    for (int lane = 0; lane < 4; lane++)
        sum += lanes[lane];
    for (; i < words; i++) {
        uint64_t value = word(data + 8 * i);
        sum += (value & 0xFFFFFFFFu) * (weights[i] & 0xFFFFFFFFu) + (value >> 32) * (weights[i] >> 32);
    }
    return sum;
}

/* The weighted sum of bytes, each at its place in its word. */
static uint64_t weighted_bytes(const uint8_t *data, const uint64_t *weights, uint64_t place, uint64_t count) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++, place++) {
        uint64_t weight = weights[place / 8] >> (place / 4 % 2 * 32) & 0xFFFFFFFFu;
        sum += ((uint64_t)data[i] << (place % 4 * 8)) * weight;
    }
    return sum;
}

/* The weighted sum of count pieces of memory, one after the other, the first of which begins at byte place of a row of
 * columns words. All rows have the weights of columns; the sum of each is multiplied with its key, of which keys[0] is
 * the first one's. */
uint64_t everstep_weigh(
    const int64_t *from, const int64_t *size, uint64_t count, uint64_t place, const uint64_t *weights,
    uint64_t columns, const uint64_t *keys) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *data = (const uint8_t *)(uintptr_t)from[i];
        uint64_t left = (uint64_t)size[i];
        while (left > 0) {
            uint64_t room = 8 * columns - place, some = room < left ? room : left;
            uint64_t head = place % 8 == 0 ? 0 : 8 - place % 8;
            head = head < some ? head : some;
            uint64_t words = (some - head) / 8, tail = some - head - 8 * words;
            uint64_t sum = weighted_bytes(data, weights, place, head);
            sum += weighted(data + head, weights + (place + head) / 8, words);
            sum += weighted_bytes(data + some - tail, weights, place + some - tail, tail);
            total += *keys * sum;
            data += some;
            left -= some;
            place += some;
            if (place == 8 * columns) {
                place = 0;
                keys++;
            }
        }
    }
    return total;
}
