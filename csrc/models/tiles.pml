/* The tile signals of the fused GEMMs, as csrc/cuda/kernels runs gemm_reduce_scatter and gemm_all_reduce: W ranks, one
 * stream each, EPOCHS launches in a row without a barrier. BLOCKS blocks per rank, which multiply first and then reduce.
 * Rank o sums UNITS units (row blocks), each made of one tile of every block of every rank.
 *
 *   enter_epoch      leave at once, and for ever, when abort[own] is set
 *   ScatterHooks     store the tile into the owner's half e&1; whoever stores the last tile of the row block:
 *                    tile_arrivals[owner][unit][own] = e (release)
 *   reduce_units     claim a unit; wait for tile_arrivals[own][unit][p] >= e of every p (acquire); read all its tiles
 *   BROADCAST        the sums to every peer's half, then the unit's word there = e; copy_units: claim, wait, read
 *   hear_from_peers  wait for the word with index 0 of every peer, also of a rank that sums nothing (EMPTY_OWNER: the last)
 *   leave_epoch      the last block of the rank to come closes the launch
 *
 * Every wait also ends by abort[own], and by a deadline: then abort[] of all ranks is set, one by one.
 */
#ifndef W
#define W 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef UNITS
#define UNITS 1
#endif
#ifndef EPOCHS
#define EPOCHS 3
#endif
#ifndef DEADLINES   /* waits, over all blocks, that may give up */
#define DEADLINES 1
#endif
#ifdef MUTANT_SINGLE_BUFFER
#define HALVES 1
#else
#define HALVES 2
#endif
#ifdef EMPTY_OWNER
#define UNITS_OF(o) ((o) == W - 1 -> 0 : UNITS)
#else
#define UNITS_OF(o) UNITS
#endif

#define EPOCH_MODULUS 8
#define FIRST_EPOCH (EPOCH_MODULUS - 2)   /* the words wrap between n = 1 and n = 2 */
#define EPOCH(n) ((FIRST_EPOCH + (n)) % EPOCH_MODULUS)
#define REACHED(seen, want) (((seen) + EPOCH_MODULUS - (want)) % EPOCH_MODULUS < EPOCH_MODULUS / 2)
#define HALF(n) (EPOCH(n) % HALVES)
#define TILE(at, from, unit) tiles[((at) * W + (from)) * UNITS + (unit)]
#define UNIT(at, from, unit) sums_there[((at) * W + (from)) * UNITS + (unit)]
#define SLOT(at, n, from, unit, block) slot[((((at) * HALVES + HALF(n)) * W + (from)) * UNITS + (unit)) * BLOCKS + (block)]
#define SUM(at, n, from, unit) sum[(((at) * HALVES + HALF(n)) * W + (from)) * UNITS + (unit)]
#define STORED(r, owner, unit) stored[((r) * W + (owner)) * UNITS + (unit)]
#define PEER ((r + k) % W)

byte tiles[W * W * UNITS], sums_there[W * W * UNITS];
byte slot[W * HALVES * W * UNITS * BLOCKS], sum[W * HALVES * W * UNITS];
byte stored[W * W * UNITS];
byte claims[W], copies[W], finished[W], launch[W], reduced[W];
bit abort[W], left_early[W];
byte deadlines = DEADLINES;
hidden byte i;

inline abort_all()
{
  k = 0;
#ifdef MUTANT_PEERS_NOT_TOLD
  abort[r] = 1
#else
  do
  :: k == W -> break
  :: else -> abort[PEER] = 1; k++
  od
#endif
}

/* `word` reaches the epoch, or the wait is cut short; k is lost then. */
inline wait_for(word)
{
  if
  :: REACHED(word, EPOCH(n))
  :: abort[r] -> cut_short = 1
  :: atomic { deadlines > 0 -> deadlines--; cut_short = 1 }; abort_all()
  fi
}

inline store_tiles()
{
  k = 1;
  do
  :: k > W -> break
  :: else ->
     unit = 0;
     do
     :: unit == UNITS_OF(PEER) -> break
     :: else ->
#ifndef MUTANT_SIGNAL_BEFORE_STORE
        SLOT(PEER, n, r, unit, b) = n;
#endif
        atomic {
          STORED(r, PEER, unit)++;
#ifdef MUTANT_FIRST_TILE_SIGNALS
          last = (STORED(r, PEER, unit) == 1);
          if
          :: STORED(r, PEER, unit) == BLOCKS -> STORED(r, PEER, unit) = 0
          :: else
          fi
#else
          last = (STORED(r, PEER, unit) == BLOCKS);
          if
          :: last -> STORED(r, PEER, unit) = 0
          :: else
          fi
#endif
        };
        if
        :: last -> TILE(PEER, r, unit) = EPOCH(n)
        :: else
        fi;
#ifdef MUTANT_SIGNAL_BEFORE_STORE
        SLOT(PEER, n, r, unit, b) = n;
#endif
        atomic { last = 0; unit++ }
     od;
     if
     :: UNITS_OF(PEER) == 0 && b == 0 -> TILE(PEER, r, 0) = EPOCH(n)
     :: else
     fi;
     k++
  od
}

inline read_unit()
{
  k = 0;
  do
  :: k == W -> break
  :: else ->
     atomic {
       unit = 0;
       do
       :: unit == BLOCKS -> break
       :: else -> assert(SLOT(r, n, k, claimed, unit) == n); unit++
       od;
       unit = 0;
       k++
     }
  od
}

inline show_sums()
{
#ifdef BROADCAST
  k = 1;
  do
  :: k == W -> break
  :: else ->
#ifdef MUTANT_SUM_SIGNALLED_EARLY
     UNIT(PEER, r, claimed) = EPOCH(n);
     SUM(PEER, n, r, claimed) = n;
#else
     SUM(PEER, n, r, claimed) = n;
     UNIT(PEER, r, claimed) = EPOCH(n);
#endif
     k++
  od
#else
  skip
#endif
}

inline reduce_units()
{
  do
  :: cut_short -> break
  :: else ->
#ifdef MUTANT_CLAIM_IN_TWO_STEPS
     claimed = claims[r];
     claims[r] = claimed + 1;
#else
     atomic { claimed = claims[r]; claims[r]++ };
#endif
     if
     :: claimed >= UNITS_OF(r) -> claimed = 0; break
     :: else
     fi;
     k = 0;
     do
     :: k == W || cut_short -> break
#ifdef MUTANT_REDUCES_BEFORE_ALL
     :: k == W - 1 -> k++
     :: k < W - 1 && !cut_short -> wait_for(TILE(r, k, claimed)); k++
#else
     :: else -> wait_for(TILE(r, k, claimed)); k++
#endif
     od;
     if
     :: !cut_short -> read_unit(); reduced[r]++; show_sums()
     :: else
     fi
  od
}

inline copy_units()
{
#ifdef BROADCAST
  do
  :: cut_short -> break
  :: else ->
     atomic { claimed = copies[r]; copies[r]++ };
     if
     :: claimed >= (W - 1) * UNITS -> claimed = 0; break
     :: else
     fi;
     k = 1 + claimed % (W - 1);
     unit = claimed / (W - 1);
     if
     :: unit < UNITS_OF(PEER) ->
        wait_for(UNIT(r, PEER, unit));
        if
        :: !cut_short -> assert(SUM(r, n, PEER, unit) == n)
        :: else
        fi
     :: else
     fi;
     unit = 0
  od
#else
  skip
#endif
}

inline hear_from_peers()
{
  k = 1;
  do
  :: k >= W -> break
  :: else ->
#ifdef MUTANT_NOT_HEARD_FROM_ALL
     skip;
#else
     wait_for(TILE(r, PEER, 0));
#endif
     k++
  od
}

proctype Block(byte r; byte b)
{
  byte n = 1, k, unit, claimed;
  bit cut_short, last;
  do
  :: n > EPOCHS -> break
  :: n <= EPOCHS && launch[r] == n ->
     if
#ifndef MUTANT_STORES_AFTER_ABORT
     :: abort[r] -> cut_short = 1
#endif
     :: else -> store_tiles(); reduce_units(); copy_units();
        if
        :: b == 0 -> hear_from_peers()
        :: else
        fi
     fi;
     atomic {
       left_early[r] = left_early[r] || cut_short;
       finished[r]++;
       if
       :: finished[r] == BLOCKS ->
          assert(left_early[r] || reduced[r] == UNITS_OF(r));   /* every unit once */
          finished[r] = 0; claims[r] = 0; copies[r] = 0; reduced[r] = 0;
          launch[r] = n + 1
       :: else
       fi;
       n++; k = 0; unit = 0; claimed = 0; cut_short = 0
     }
  od
}

init {
  atomic {
    do
    :: i == W * W * UNITS -> break
    :: else -> tiles[i] = EPOCH(0); sums_there[i] = EPOCH(0); i++
    od;
    i = 0;
    do
    :: i == W * BLOCKS -> break
    :: else ->
       launch[i / BLOCKS] = 1;
       run Block(i / BLOCKS, i % BLOCKS);
       i++
    od
  }
}
