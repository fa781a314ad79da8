/* The signal protocol of one group, as csrc/runtime/group.cpp runs it: W ranks, one symmetric segment each, EPOCHS
 * calls in a row. What a call does between `post` and its end is the inline `operate` of the op that includes this
 * file first and ranks.pml last.
 *
 * A rank consumes one epoch per call, whatever becomes of the call:
 *   advance   wait until every peer has entered e-1: it has then left e-2, the last reader of the parity slot e&1
 *   post      fingerprint[e&1], then entered = e (release)
 *   operate   publish: data in half e&1, then value = (e, chunk) (release)
 *             wait: a peer's value (acquire), then abandoned[e&1] and fingerprint[e&1]; then its data may be read
 *   abandon   a rank that fails in e stores abandoned[e&1], then value = (e, LAST_CHUNK) (release); next call is e+1
 * A rank that dies, or gives up in `advance` (it owns no slot to say so in), has left the group; every wait sees that.
 *
 * Words live modulo a small power of two and start just below the wrap; `n` is the true epoch and is only used by the
 * assertions. Interleavings are sequentially consistent: the order of stores is what is checked here, the memory
 * order of each store is checked by the emulator under ThreadSanitizer.
 */
#ifndef W
#define W 2
#endif
#ifndef EPOCHS
#define EPOCHS 4
#endif
#ifndef FAULTS /* faulty calls in one run, over all ranks and epochs */
#define FAULTS 2
#endif
#ifdef MUTANT_SINGLE_BUFFER
#define HALVES 1
#else
#define HALVES 2
#endif

/* what becomes of one call on one rank; chosen before the run */
#define GOOD 0
#define OTHER_OP 1     /* calls another op than its peers */
#define REFUSES 2      /* bad arguments on this rank alone */
#define FAILS 3        /* any of its waits may give up, or it throws before its first chunk */
#define DIES 4         /* any of its waits may be its last step */

#define PARTIAL 0
#define FINAL 1
#define LAST_CHUNK 3
#define EPOCH_MODULUS 8
#define FIRST_EPOCH (EPOCH_MODULUS - 2)   /* epoch of n = 0: the words wrap between n = 1 and n = 2 */
#define VALUE_MODULUS (EPOCH_MODULUS * (LAST_CHUNK + 1))

#define EPOCH(n) ((FIRST_EPOCH + (n)) % EPOCH_MODULUS)
#define PROGRESS(n, chunk) (EPOCH(n) * (LAST_CHUNK + 1) + (chunk))
#define REACHED(seen, want, modulus) (((seen) + (modulus) - (want)) % (modulus) < (modulus) / 2)
#define SLOT(rank, n) ((rank) * 2 + EPOCH(n) % 2)
#define VALUE(channel, rank) value[(channel) * W + (rank)]
#define DATA(rank, cell) data[((rank) * HALVES + EPOCH(n) % HALVES) * CELLS + (cell)]
#define PEER ((r + k) % W)   /* every rank starts behind itself: ranks are alike, and rank 0 may be taken as faulty */

/* fates travel as three bits per epoch in the parameter of a process: constants of that process alone */
#define FATE ((plan >> (3 * (n - 1))) & 7)
#define FATE_OF(rank, n) ((plans[rank] >> (3 * ((n) - 1))) & 7)
#define FINGERPRINT(fate) ((fate) == OTHER_OP || (fate) == REFUSES -> (fate) : GOOD)

#ifdef MUTANT_ONE_ABANDONED_WORD
#define ABANDONED(channel, rank) abandoned[(channel) * W * 2 + SLOT(rank, 0)]
#else
#define ABANDONED(channel, rank) abandoned[(channel) * W * 2 + SLOT(rank, n)]
#endif

byte entered[W];
byte value[CHANNELS * W];
byte fingerprint[W * 2];
byte abandoned[CHANNELS * W * 2];
bit left[W];
byte data[W * HALVES * CELLS];

hidden byte i;
int plans[W];
bit doubtful[EPOCHS + 1];    /* epochs that some rank may fail first-hand */
bit succeeded[EPOCHS + 1];

/* A bounded wait. It ends by the condition, because the peer has left, or by what fate has in store. */
inline wait_until(condition)
{
  if
  :: condition
  :: left[PEER] -> raised = 1; gone = 1
  :: FATE == FAILS -> raised = 1
  :: FATE == DIES -> raised = 1; gone = 1
  fi
}

/* data[cell] = n, then the word that lets the peers read it */
inline publish(channel, chunk, cell)
{
#ifdef MUTANT_VALUE_BEFORE_DATA
  VALUE(channel, r) = PROGRESS(n, chunk);
  DATA(r, cell) = n
#else
  DATA(r, cell) = n;
  VALUE(channel, r) = PROGRESS(n, chunk)
#endif
}

/* abandoned[e&1] first, then the fingerprint: a refused call carries a fingerprint of its own. */
inline check_peer(channel)
{
  if
  :: ABANDONED(channel, PEER) == n -> raised = 1
  :: else ->
     if
     :: fingerprint[SLOT(PEER, n)] != FINGERPRINT(FATE) -> raised = 1; assert(FATE_OF(PEER, n) != FATE)
     :: else
     fi
  fi;
  assert(!raised || doubtful[n])
}

/* Wait for a chunk of PEER and check that it is what this call wants; then read it, unless `raised`. */
inline consume(channel, chunk, cell)
{
  wait_until(REACHED(VALUE(channel, PEER), PROGRESS(n, chunk), VALUE_MODULUS));
  if
  :: raised
  :: else -> check_peer(channel)
  fi;
  if
  :: raised
  :: else -> assert(DATA(PEER, cell) == n)
  fi
}
