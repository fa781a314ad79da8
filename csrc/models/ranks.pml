/* The ranks: a run is EPOCHS calls on each of them, with FAULTS faulty ones among them. */

inline advance()
{
  k = 1;
  do
  :: k == W || raised -> break
#ifdef MUTANT_NO_ENTRY_WAIT
  :: k < W -> k++
#endif
#ifdef MUTANT_REFUSAL_SKIPS_WAIT
  :: k < W && FATE == REFUSES -> k++
#endif
  :: else -> wait_until(REACHED(entered[PEER], EPOCH(n - 1), EPOCH_MODULUS)); k++
  od;
  gone = gone || raised
}

inline post()
{
  fingerprint[SLOT(r, n)] = FINGERPRINT(FATE);
  entered[r] = EPOCH(n)
}

inline abandon_channel(channel)
{
#ifdef MUTANT_ABANDONED_AFTER_VALUE
  VALUE(channel, r) = PROGRESS(n, LAST_CHUNK);
  ABANDONED(channel, r) = n
#else
  ABANDONED(channel, r) = n;
#ifndef MUTANT_SILENT_FAILURE
  VALUE(channel, r) = PROGRESS(n, LAST_CHUNK)
#endif
#endif
}

/* A result may be returned only if no rank refused the call and all ranks called the same op. */
inline check_success()
{
  d_step {
    succeeded[n] = 1;
    k = 1;
    do
    :: k == W -> break
    :: else ->
       assert(FATE_OF(PEER, n) != REFUSES);
       assert((FATE_OF(PEER, n) == OTHER_OP) == (FATE == OTHER_OP));
       k++
    od
  }
}

inline call()
{
#ifdef MUTANT_FINGERPRINT_AT_ENTRY
  fingerprint[SLOT(r, n)] = FINGERPRINT(FATE);
#endif
  advance();
  if
  :: raised
  :: else ->
     post();
     if
     :: FATE == REFUSES || FATE == FAILS -> assert(FATE != REFUSES || !succeeded[n]); raised = 1
     :: FATE != REFUSES -> operate()
     fi;
     if
     :: raised && !gone ->
        abandon_channel(PARTIAL);
#if CHANNELS == 2
        abandon_channel(FINAL)
#endif
     :: else
     fi
  fi;
  if
  :: raised
  :: else -> check_success()
  fi
}

proctype Rank(byte r; int plan)
{
  byte n = 1, k, c;
  bit raised, gone;
  do
  :: n > EPOCHS || gone -> break
  :: else -> call(); d_step { n++; raised = 0; k = 0; c = 0 }
  od;
  if
  :: gone -> left[r] = 1
  :: else
  fi
}

/* Each fault picks a fate for one call; the first one picks it on rank 0. */
inline choose_plans()
{
  byte faults, rank, n, f;
  do
  :: faults == FAULTS -> break
  :: faults < FAULTS ->
     rank = 0; n = 1; f = OTHER_OP;
     do
     :: faults > 0 && rank < W - 1 -> rank++
     :: break
     od;
     do
     :: n < EPOCHS -> n++
     :: break
     od;
     do
     :: f < DIES -> f++
     :: break
     od;
     plans[rank] = plans[rank] | (f << (3 * (n - 1)));
     doubtful[n] = 1;
     faults++
  :: faults > 0 -> break
  od;
  faults = 0; rank = 0; n = 0; f = 0
}

init {
  atomic {
    choose_plans();
    i = 0;
    do
    :: i == W -> break
    :: else ->
       entered[i] = EPOCH(0);
       VALUE(PARTIAL, i) = PROGRESS(0, LAST_CHUNK);
#if CHANNELS == 2
       VALUE(FINAL, i) = PROGRESS(0, LAST_CHUNK);
#endif
       run Rank(i, plans[i]);
       i++
    od
  }
}
