/* One shot: every rank publishes its CHUNKS chunks and reads those of every peer. With MEET, the ranks first look at
 * each other's posts, as calls do whose work depends on the peers' extents.
 */
#ifndef CHUNKS
#define CHUNKS 1
#endif
#define CELLS CHUNKS
#define CHANNELS 1

#include "signals.pml"

inline meet()
{
  k = 1;
  do
  :: k == W || raised -> break
  :: else ->
     wait_until(REACHED(entered[PEER], EPOCH(n), EPOCH_MODULUS));
     if
     :: raised
     :: else -> check_peer(PARTIAL)
     fi;
     k++
  od
}

inline publish_all()
{
  c = 0;
  do
  :: c == CHUNKS -> break
  :: else -> publish(PARTIAL, c, c); c++
  od
}

inline consume_all()
{
  k = 1;
  do
  :: k == W || raised -> break
  :: else ->
     c = 0;
     do
     :: c == CHUNKS || raised -> break
     :: else -> consume(PARTIAL, c, c); c++
     od;
     k++
  od
}

inline operate()
{
#ifdef MEET
  meet();
#endif
  if
  :: raised
  :: else -> publish_all(); consume_all()
  fi
}

#include "ranks.pml"
