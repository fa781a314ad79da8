/* The signal protocol of the device kernels, as csrc/cuda/kernels/signals.cuh runs it: W ranks, one stream each, EPOCHS
 * launches in a row without a barrier. One block per rank: blocks pair up with their namesakes and do not meet.
 *
 *   enter_epoch   leave at once, and for ever, when abort[own] is set
 *   (kernel)      stage into half e&1
 *   meet_peers    arrivals[peer][own] = e (release) for every peer; wait for arrivals[own][peer] >= e (acquire).
 *                 Every wait also ends by abort[own], and by a deadline: then abort[] of all ranks is set, one by one
 *   (kernel)      read half e&1 of every peer
 *
 * Unlike on the CPU an abort is for good: the group starts again when the host has reset all segments.
 */
#ifndef W
#define W 2
#endif
#ifndef EPOCHS
#define EPOCHS 4
#endif
#ifndef DEADLINES   /* waits, over all ranks, that may give up */
#define DEADLINES 1
#endif
#ifdef MUTANT_SINGLE_BUFFER
#define HALVES 1
#else
#define HALVES 2
#endif

#define EPOCH_MODULUS 8
#define FIRST_EPOCH (EPOCH_MODULUS - 2)   /* the words wrap between n = 1 and n = 2 */
#define EPOCH(n) ((FIRST_EPOCH + (n)) % EPOCH_MODULUS)
#define REACHED(seen, want) (((seen) + EPOCH_MODULUS - (want)) % EPOCH_MODULUS < EPOCH_MODULUS / 2)
#define ARRIVED(at, from) arrivals[(at) * W + (from)]
#define HALF(rank, n) half[(rank) * HALVES + EPOCH(n) % HALVES]
#define PEER ((r + k) % W)

byte arrivals[W * W];
bit abort[W];
byte half[W * HALVES];
byte deadlines = DEADLINES;
hidden byte i, j;

inline abort_all()
{
#ifdef MUTANT_PEERS_NOT_TOLD
  abort[r] = 1
#else
  k = 0;
  do
  :: k == W -> break
  :: else -> abort[PEER] = 1; k++
  od
#endif
}

inline signal_peers()
{
  k = 1;
  do
  :: k == W -> break
  :: else -> ARRIVED(PEER, r) = EPOCH(n); k++
  od
}

inline wait_for_peers()
{
  k = 1;
  do
  :: k == W || cut_short -> break
  :: else ->
     if
     :: REACHED(ARRIVED(r, PEER), EPOCH(n)) -> k++
     :: abort[r] -> cut_short = 1
     :: atomic { deadlines > 0 -> deadlines--; cut_short = 1 }; abort_all()
     fi
  od
}

inline stage_meet_and_read()
{
#ifdef MUTANT_SIGNAL_BEFORE_STAGING
  signal_peers();
  HALF(r, n) = n;
#else
  HALF(r, n) = n;
  signal_peers();
#endif
  wait_for_peers();
  k = 1;
  do
  :: k == W || cut_short -> break
  :: else -> assert(HALF(PEER, n) == n); k++
  od
}

proctype Rank(byte r)
{
  byte n = 1, k;
  bit cut_short;
  do
  :: n > EPOCHS -> break
  :: else ->
     if
#ifndef MUTANT_STAGES_AFTER_ABORT
     :: abort[r]
#endif
     :: else -> stage_meet_and_read()
     fi;
     atomic { n++; k = 0; cut_short = 0 }
  od
}

init {
  atomic {
    do
    :: i == W -> break
    :: else ->
       j = 0;
       do
       :: j == W -> break
       :: else -> ARRIVED(i, j) = EPOCH(0); j++
       od;
       run Rank(i);
       i++
    od
  }
}
