// cudatma: kernels/all_reduce.cu.j2 for sm_90a
// config: AllReduceConfig
//   ranks = 2
//   dtype = 'float16'

// primitives.cu contains
// u8, u16, u32, u64, griddepcontrol_wait, griddepcontrol_launch_dependents, low_to_float, high_to_float, to_pair

namespace cudatma {
constexpr u32 RANKS = 2;
constexpr u32 WORDS = 3;   // words per packet; a word contains two elements
constexpr u32 BATCH = 2;   // packets of each rank that a thread loads before it waits for the first packet

// The state of a rank. An inbox is an array of packets with axes [slot][sending rank][packet]. Odd-numbered launches use slot 1, and
// even-numbered launches use slot 0.
struct Member {
    uint4* inboxes[RANKS];   // the inboxes of all ranks, each in the memory of its GPU
    u32* next_launch;        // for each CTA, the number of its next launch; numbers begin at 1
    volatile u32* gave_up;   // nonzero if a peer has failed to send
    u64* failure;            // in host memory: launch number << 32 | (rank whose packet is missing + 1)
    u64 timeout_ns;
    u32 slot_packets;        // packets per rank in a slot
    u32 rank;                // this rank
};

// [PTX ISA, st] Store a packet with one 128-bit access, so that the launch number (w) arrives together with the words of the launch.
// The store has system scope because other GPUs read the packet. It is relaxed because it need not order other accesses.
__device__ __forceinline__ void store_packet(uint4* to, uint4 packet) {
    asm volatile(
        "{\n.reg .b64 low, high;\n.reg .b128 packet;\n"
        "mov.b64 low, {%1, %2};\n"
        "mov.b64 high, {%3, %4};\n"
        "mov.b128 packet, {low, high};\n"
        "st.relaxed.sys.global.b128 [%0], packet;\n"
        "}"
        : : "l"(to), "r"(packet.x), "r"(packet.y), "r"(packet.z), "r"(packet.w) : "memory");
}

// [PTX ISA, ld] Load a packet with one 128-bit access.
__device__ __forceinline__ uint4 load_packet(const uint4* from) {
    uint4 packet;
    asm volatile(
        "{\n.reg .b64 low, high;\n.reg .b128 packet;\n"
        "ld.relaxed.sys.global.b128 packet, [%4];\n"
        "mov.b128 {low, high}, packet;\n"
        "mov.b64 {%0, %1}, low;\n"
        "mov.b64 {%2, %3}, high;\n"
        "}"
        : "=r"(packet.x), "=r"(packet.y), "=r"(packet.z), "=r"(packet.w) : "l"(from) : "memory");
    return packet;
}

// [PTX ISA, Special Registers, %globaltimer] Return the time in nanoseconds.
__device__ __forceinline__ u64 globaltimer() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Report to the host that the packet of rank `peer` is missing.
__device__ __forceinline__ void report(u64* failure, u32 peer, u32 launch) {
    const u64 what = (u64)launch << 32 | (peer + 1);
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(failure), "l"(what) : "memory");
}

// Wait for a packet of this launch. The peer may be several kernels behind, or may have failed. After timeout_ns, the thread gives up. It
// sets the packet to NaNs, and it sets `launch` to 0 so that it does not wait for other packets.
__device__ __forceinline__ void wait_for_packet(uint4& packet, const uint4* from, const Member& member, u32 peer, u32& launch) {
    if (packet.w == launch && launch != 0) return;
    const u64 began = globaltimer();
    for (u32 tries = 1; launch != 0 && packet.w != launch; ++tries) {
        if (tries % 64 == 0 && globaltimer() - began > member.timeout_ns) {
            report(member.failure, peer, launch);
            *member.gave_up = 1;
            launch = 0;
        }
        packet = load_packet(from);
    }
    if (launch == 0) packet = make_uint4(0xffffffffu, 0xffffffffu, 0xffffffffu, 0);   // two NaNs per word
}

// Return packet number `index` of the message. Words after the end of the message are zero.
__device__ __forceinline__ uint4 packet_of(const u32* message, u32 words, u32 index, u32 launch) {
    const u32 first = index * WORDS;
    uint4 packet = make_uint4(message[first], 0, 0, launch);
    if (first + 1 < words) packet.y = message[first + 1];
    if (first + 2 < words) packet.z = message[first + 2];
    return packet;
}

// Add up one word from each rank in fp32. All ranks add in the same order, so their results are bitwise identical.
__device__ __forceinline__ u32 sum_words(const u32 (&words)[RANKS]) {
    float low = low_to_float(words[0]), high = high_to_float(words[0]);
#pragma unroll
    for (u32 rank = 1; rank < RANKS; ++rank) {
        low += low_to_float(words[rank]);
        high += high_to_float(words[rank]);
    }
    return to_pair(low, high);
}

// Store the sums of packet number `index`.
__device__ __forceinline__ void store_sum(u32* message, u32 words, u32 index, const uint4 (&packets)[RANKS]) {
    u32 parts[WORDS][RANKS];
#pragma unroll
    for (u32 rank = 0; rank < RANKS; ++rank) {
        parts[0][rank] = packets[rank].x;
        parts[1][rank] = packets[rank].y;
        parts[2][rank] = packets[rank].z;
    }
#pragma unroll
    for (u32 i = 0; i < WORDS; ++i)
        if (index * WORDS + i < words) message[index * WORDS + i] = sum_words(parts[i]);
}

// Sum the messages of all ranks in place. Each rank sends its message to all inboxes and sums the messages in its own inbox. Each packet
// contains the number of its launch, so inboxes need not be cleared. The number cannot be a launch parameter, because a graph replays a
// launch with the same parameters. Instead, each CTA counts the launches. All launches must have the same grid.
//
// Two slots suffice. A rank's launch n + 2 overwrites the packets of launch n, but it starts only after the rank's launch n + 1 has
// completed. Launch n + 1 has then received a packet from every peer, and each peer sent its packet after its own launch n had read all
// packets. This argument requires that the launches of a rank do not overlap, so they must be in one stream or ordered by events.
//
// After a peer has failed to send, later launches neither send nor wait, and all results are NaNs. The host reads `failure` and raises an
// error.
__device__ __forceinline__ void all_reduce(const Member& member, u32* message, u32 words) {
    griddepcontrol_launch_dependents();   // allows the next kernel to start and load its weights
    griddepcontrol_wait();                // wait for previous kernels, which write the message and the launch number
    u32* const next_launch = member.next_launch + blockIdx.x;
    const u32 number = *next_launch;
    u32 launch = *member.gave_up ? 0 : number;   // read only once because other CTAs may give up at any time
    const u32 slot = launch % 2 * RANKS * member.slot_packets;
    const u32 packets = (words + WORDS - 1) / WORDS;
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;

    for (u32 first = thread; launch != 0 && first < packets; first += BATCH * threads) {
        uint4 batch[BATCH];
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)
            if (first + i * threads < packets) batch[i] = packet_of(message, words, first + i * threads, launch);
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            if (first + i * threads >= packets) break;
            const u32 place = slot + member.rank * member.slot_packets + first + i * threads;
#pragma unroll
            for (u32 rank = 0; rank < RANKS; ++rank) store_packet(member.inboxes[rank] + place, batch[i]);
        }
    }
    const uint4* const inbox = member.inboxes[member.rank] + slot;
    for (u32 first = thread; first < packets; first += BATCH * threads) {
        uint4 batch[BATCH][RANKS];
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i)   // issue all loads before the first wait
#pragma unroll
            for (u32 rank = 0; rank < RANKS; ++rank)
                if (first + i * threads < packets)
                    batch[i][rank] = load_packet(inbox + rank * member.slot_packets + first + i * threads);
#pragma unroll
        for (u32 i = 0; i < BATCH; ++i) {
            const u32 index = first + i * threads;
            if (index >= packets) break;
#pragma unroll
            for (u32 rank = 0; rank < RANKS; ++rank)
                wait_for_packet(batch[i][rank], inbox + rank * member.slot_packets + index, member, rank, launch);
            store_sum(message, words, index, batch[i]);
        }
    }

    __syncthreads();   // all threads must have read the launch number before thread 0 overwrites it
    // Launch numbers wrap around to 2, because 0 marks a failure, and launch 2^32 - 1 has used slot 1, so the next launch must use slot 0.
    if (threadIdx.x == 0) *next_launch = number == 0xffffffffu ? 2 : number + 1;
}
}  // namespace cudatma

// Sum the messages of all ranks, `words` words each, in place. A word contains two elements.
extern "C" __global__ void __launch_bounds__(512, 1)
all_reduce(const __grid_constant__ cudatma::Member member, cudatma::u32* message, cudatma::u32 words) {
    cudatma::all_reduce(member, message, words);
}
