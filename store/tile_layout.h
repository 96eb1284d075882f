// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

/// Geometry of the f12 encoding (store/FORMAT.md, "f12"). Pure arithmetic, shared by the codec, the bundle and every
/// kernel; usable in device code. All sizes are bytes, all indexes count from 0.
namespace weightd::f12 {

inline constexpr uint32_t kUnitRows = 16;         // rows of w in one unit
inline constexpr uint32_t kTileCols = 64;         // columns of w in one tile
inline constexpr uint32_t kGroupTiles = 8;        // tiles of one unit that share a record
inline constexpr uint32_t kTileBytes = 1536;      // planes L_A, L_B, C of 512 bytes each
inline constexpr uint32_t kTilePlaneBytes = 512;  // 32 lanes x 4 words
inline constexpr uint32_t kRecordBytes = 32;      // u8 end[8], 6 words
inline constexpr uint32_t kRecordWords = 6;
inline constexpr uint32_t kRecordWordsOffset = 8;  // of the first word; the offset of a list or dense group is that word
inline constexpr uint32_t kInlineEscapes = 6;     // a group with at most this many escapes keeps them in its record
inline constexpr uint32_t kListEscapes = 254;     // at most this many in a pool list; more: a dense group
inline constexpr uint32_t kDenseEnd = 255;        // every end[] of a dense group
inline constexpr uint32_t kDenseTileBytes = 1024; // true high bytes of one tile of a dense group, scratch order
inline constexpr uint32_t kPoolAlign = 16;        // lists and dense blocks start at multiples; offsets are stored / 16
inline constexpr uint32_t kMaxWindow = 120;       // w of a row is 0..120
inline constexpr uint32_t kPlaneAlign = 256;      // codes, windows, records, pool in the arena

/// Counts and plane sizes of `batch` equal matrices [n, k], coded one after the other (an expert stack; 1 for a matrix).
/// n and k are at most 2^32 - 1 and batch * units * tiles must fit 2^48 (checked by whoever reads them from a file).
struct Geometry {
  uint64_t n = 0, k = 0, batch = 1;

  constexpr uint64_t units() const { return (n + kUnitRows - 1) / kUnitRows; }      // per matrix
  constexpr uint64_t tiles() const { return (k + kTileCols - 1) / kTileCols; }      // per unit
  constexpr uint64_t groups() const { return (tiles() + kGroupTiles - 1) / kGroupTiles; }  // per unit

  // One matrix:
  constexpr uint64_t matrix_codes_bytes() const { return units() * tiles() * kTileBytes; }
  constexpr uint64_t matrix_windows_bytes() const { return units() * kUnitRows; }
  constexpr uint64_t matrix_records_bytes() const { return units() * groups() * kRecordBytes; }
  // The whole plane:
  constexpr uint64_t codes_bytes() const { return batch * matrix_codes_bytes(); }
  constexpr uint64_t windows_bytes() const { return batch * matrix_windows_bytes(); }
  constexpr uint64_t records_bytes() const { return batch * matrix_records_bytes(); }
  constexpr uint64_t raw_bytes() const { return batch * n * k * 2; }
};

/// Column of byte b (0..3) of word j (0..3) of lane l (0..31) inside its tile; the row is l / 4, plus 8 in plane L_B.
constexpr uint32_t tile_column(uint32_t lane, uint32_t word, uint32_t byte) {
  return 16 * word + 2 * (lane & 3) + 8 * (byte >> 1) + (byte & 1);
}

/// `pos` of an escape entry: the byte's place in a tile's high-byte scratch (plane A 512 bytes, plane B 512).
constexpr uint32_t scratch_pos(bool plane_b, uint32_t lane, uint32_t word, uint32_t byte) {
  return (plane_b ? 512U : 0U) + 16 * lane + 4 * word + byte;
}

/// Where byte b of the 64 bytes that one row has in a tile plane (lanes 4g to 4g + 3, so bytes 64g to 64g + 63) stands among the
/// columns of the tile: b = 16q + 4j + 2s + h is column 16j + 8s + 2q + h.
constexpr uint32_t row_byte_column(uint32_t b) { return tile_column(b >> 4, (b >> 2) & 3, b & 3); }

/// Row (0..15) of its unit and column (0..63) of its tile that an entry's `pos` means.
constexpr uint32_t scratch_row(uint32_t pos) { return (pos >= kTilePlaneBytes ? 8 : 0) + (pos % kTilePlaneBytes) / 64; }
constexpr uint32_t scratch_column(uint32_t pos) { return row_byte_column(pos % 64); }

/// An escape entry: true high byte and place.
constexpr uint32_t make_entry(uint32_t pos, uint32_t high) { return pos | high << 16; }
constexpr uint32_t entry_pos(uint32_t entry) { return entry & 0xFFFF; }
constexpr uint32_t entry_high(uint32_t entry) { return entry >> 16; }

constexpr uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

}  // namespace weightd::f12
