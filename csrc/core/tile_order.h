// In which order the tiles of a matrix are multiplied, so that tiles of one wave share rows and columns in the L2.
#pragma once

#include <cstdint>

#include "core/qualifiers.h"

namespace interlace {

struct TilePlace {
  int32_t row_block = 0;
  int32_t column_block = 0;
};

// Row blocks that are walked together, column block by column block: 132 blocks of a Hopper GPU then cover about as
// many rows as columns at once (128 x 256 tiles: 16 x 8; 128 x 128: 12 x 11), which needs the fewest bytes.
INTERLACE_HD constexpr int32_t row_blocks_together(int32_t tile_columns) {
  return tile_columns >= 256 ? 16 : 12;
}

// Tile `index` of row_blocks x column_blocks: groups of `together` row blocks, in each group column block by column
// block, rows first. Every tile comes once.
INTERLACE_HD constexpr TilePlace tile_place(int32_t index, int32_t row_blocks, int32_t column_blocks,
                                            int32_t together) {
  const int32_t group = index / (together * column_blocks);
  const int32_t first = group * together;
  const int32_t rows = row_blocks - first < together ? row_blocks - first : together;
  const int32_t within = index - first * column_blocks;
  return {first + within % rows, within / rows};
}

static_assert(tile_place(0, 3, 2, 2).row_block == 0 && tile_place(3, 3, 2, 2).column_block == 1 &&
              tile_place(4, 3, 2, 2).row_block == 2 && tile_place(5, 3, 2, 2).column_block == 1);

}  // namespace interlace
