/* Owner computes: rank r writes W partial blocks into its half, sums block r of all ranks, publishes the sum on a second
 * channel, and reads the sums of the others. Cells 0..W-1 of a half are the partial blocks, cell W is the sum.
 */
#define CELLS (W + 1)
#define CHANNELS 2

#include "signals.pml"

/* One word covers all partial blocks; the last of them is written in the same step as the others, next to the word. */
inline publish_partials()
{
  d_step {
    c = 0;
    do
    :: c == W - 1 -> break
    :: else -> DATA(r, c) = n; c++
    od
  };
  publish(PARTIAL, 0, W - 1)
}

inline consume_all(channel, cell)
{
  k = 1;
  do
  :: k == W || raised -> break
  :: else -> consume(channel, 0, cell); k++
  od
}

inline operate()
{
  publish_partials();
  consume_all(PARTIAL, r);
  if
  :: raised
  :: else -> publish(FINAL, 0, W); consume_all(FINAL, W)
  fi
}

#include "ranks.pml"
