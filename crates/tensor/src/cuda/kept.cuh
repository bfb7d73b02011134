// How a block walks over the kept weights of a tensor; see mask.rs for the two forms of a mask.
//
// In bits, a block has TILE weights, whose kept ones it first lists in shared memory; as places, a block has TILE kept
// weights. Either way a thread then has a kept weight's number among all kept ones, and its place.

// A mask on the card: words and ranks, or places; null where it is the other form, both null where all are kept.
struct Mask {
    const u32* words;
    const u32* ranks;
    const u32* places;
    i64 length;
    i64 kept;
};

// Kept weights of this block: `count` of them, the first being number `first` of all; `origin` is the block's first
// weight, and places are counted from it.
struct Kept {
    i64 first;
    i64 origin;
    u32 count;
};

// A thread's word of a tile, in bits, and how many weights of the tile are kept before it.
struct RankedWord {
    u32 bits;
    u32 before;
    Kept here;
};

// Threads past the tile's words have none. All threads of a block of 256 call it.
DEVICE RankedWord rank_word(const Mask& mask, u32 tile) {
    constexpr int WORDS = TILE / 32, WARPS = WORDS / WARP;
    __shared__ u32 totals[WARPS];
    const u32 i = threadIdx.x;
    const i64 origin = static_cast<i64>(tile) * TILE, word = origin / 32 + i;
    const u32 bits = i < WORDS && word * 32 < mask.length ? mask.words[word] : 0;
    const u32 own = __popc(bits);
    u32 sum = own;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const u32 below = __shfl_up_sync(FULL_WARP, sum, step);
        if (lane() >= step) sum += below;
    }
    if (i < WORDS && lane() == WARP - 1) totals[warp_in_block()] = sum;
    __syncthreads();
    u32 before = 0, count = 0;
    for (u32 w = 0; w < WARPS; ++w) {
        if (w < warp_in_block()) before += totals[w];
        count += totals[w];
    }
    return RankedWord{bits, before + sum - own, Kept{mask.ranks[tile * (TILE / 512)], origin, count}};
}

// The places of the kept weights of tile `tile`, in bits, into `places` [TILE]. All threads of a block of 256 call it.
DEVICE Kept list_kept(const Mask& mask, u32 tile, u16* places) {
    RankedWord word = rank_word(mask, tile);
    for (; word.bits != 0; word.bits &= word.bits - 1)
        places[word.before++] = threadIdx.x * 32 + __ffs(word.bits) - 1;
    __syncthreads();
    return word.here;
}

// How many weights of tile `tile` are kept, in bits, and which is the first, for what needs no places.
DEVICE Kept span_kept(const Mask& mask, u32 tile) {
    const i64 origin = static_cast<i64>(tile) * TILE;
    const i64 first = mask.ranks[tile * (TILE / 512)];
    const i64 end = origin + TILE < mask.length ? mask.ranks[(tile + 1) * (TILE / 512)] : mask.kept;
    return Kept{first, origin, static_cast<u32>(end - first)};
}

// Those of a block where the mask is places.
DEVICE Kept count_kept(const Mask& mask, u32 block) {
    const i64 first = static_cast<i64>(block) * TILE, left = mask.kept - first;
    return Kept{first, 0, static_cast<u32>(left < TILE ? left : TILE)};
}
