//! Which keys a query row sees.
//!
//! Causal attention and sliding windows are the same two numbers: how many keys to the left and to
//! the right of the diagonal a row sees. A row sees one contiguous range of keys whose ends never
//! move left from one row to the next; everything that skips or masks tiles rests on that.

use std::ops::Range;

/// The visible band of one problem, normalised so that equal masks compare equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mask {
    seqlen_q: usize,
    seqlen_k: usize,
    /// Keys visible to the left of the diagonal; absent means all.
    window_left: Option<usize>,
    /// Keys visible to the right of the diagonal; absent means all, 0 is causal.
    window_right: Option<usize>,
}

impl Mask {
    /// Normalises: causal is `window_right = 0`, and a window that hides nothing becomes absent. So
    /// a single causal query and an oversized window run the very same code as the plain call.
    pub(crate) fn new(
        seqlen_q: usize,
        seqlen_k: usize,
        causal: bool,
        window_left: Option<usize>,
        window_right: Option<usize>,
    ) -> Self {
        let window_right = if causal { Some(0) } else { window_right };
        Self {
            seqlen_q,
            seqlen_k,
            // The last row is aligned with the last key, so it is the one that reaches furthest left.
            window_left: window_left.filter(|left| left.saturating_add(1) < seqlen_k),
            // The first row is aligned with key `seqlen_k - seqlen_q`.
            window_right: window_right.filter(|right| right.saturating_add(1) < seqlen_q),
        }
    }

    /// Keys visible to the left of the diagonal; absent means all.
    #[cfg(feature = "cuda")]
    pub(crate) fn window_left(&self) -> Option<usize> {
        self.window_left
    }

    /// Keys visible to the right of the diagonal; absent means all, 0 is causal.
    #[cfg(feature = "cuda")]
    pub(crate) fn window_right(&self) -> Option<usize> {
        self.window_right
    }

    /// Keys that query row `row` sees.
    pub(crate) fn keys_of_row(&self, row: usize) -> Range<usize> {
        self.keys_of_rows(row..row + 1)
    }

    /// Keys that at least one of the query rows in `rows` sees (empty for empty `rows`).
    pub(crate) fn keys_of_rows(&self, rows: Range<usize>) -> Range<usize> {
        if rows.is_empty() {
            return 0..0;
        }
        let end = match self.window_right {
            None => self.seqlen_k,
            Some(right) => self.clamp_key(rows.end + self.seqlen_k, self.seqlen_q, right, 0),
        };
        let start = match self.window_left {
            None => 0,
            Some(left) => self.clamp_key(rows.start + self.seqlen_k, self.seqlen_q, 0, left),
        };
        start.min(end)..end
    }

    /// Whether every query row in `rows` sees every key in `keys`; neither is empty.
    pub(crate) fn all_visible(&self, rows: Range<usize>, keys: Range<usize>) -> bool {
        // Both ends of the visible range grow with the row.
        self.keys_of_row(rows.end - 1).start <= keys.start
            && keys.end <= self.keys_of_row(rows.start).end
    }

    /// Query rows that see at least one of the keys in `keys` (empty for empty `keys`).
    pub(crate) fn rows_of_keys(&self, keys: Range<usize>) -> Range<usize> {
        if keys.is_empty() {
            return 0..0;
        }
        // Key j is aligned with row j + seqlen_q - seqlen_k; a window to the right of the row is one
        // to the left of the key.
        let start = match self.window_right {
            None => 0,
            Some(right) => (keys.start + self.seqlen_q)
                .saturating_sub(self.seqlen_k)
                .saturating_sub(right)
                .min(self.seqlen_q),
        };
        let end = match self.window_left {
            None => self.seqlen_q,
            Some(left) => (keys.end + self.seqlen_q)
                .saturating_add(left)
                .saturating_sub(self.seqlen_k)
                .min(self.seqlen_q),
        };
        start.min(end)..end
    }

    /// `plus + right - minus - left`, clamped to `0..=seqlen_k`.
    fn clamp_key(&self, plus: usize, minus: usize, right: usize, left: usize) -> usize {
        plus.saturating_add(right)
            .saturating_sub(minus.saturating_add(left))
            .min(self.seqlen_k)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, one row and one key at a time.
    fn sees(
        [seqlen_q, seqlen_k]: [usize; 2],
        causal: bool,
        [left, right]: [Option<usize>; 2],
        row: usize,
        key: usize,
    ) -> bool {
        let aligned = (row + seqlen_k) as i128 - seqlen_q as i128;
        let right = if causal { Some(0) } else { right };
        left.is_none_or(|left| key as i128 >= aligned - left as i128)
            && right.is_none_or(|right| key as i128 <= aligned + right as i128)
    }

    #[test]
    fn ranges_hold_exactly_the_visible_rows_and_keys() {
        let windows = [None, Some(0), Some(1), Some(3), Some(100), Some(usize::MAX)];
        for seqlens in [[1, 1], [1, 7], [7, 1], [5, 5], [4, 9], [9, 4]] {
            let [seqlen_q, seqlen_k] = seqlens;
            for (left, right) in windows.iter().flat_map(|&l| windows.map(|r| (l, r))) {
                for causal in [false, true] {
                    let mask = Mask::new(seqlen_q, seqlen_k, causal, left, right);
                    let sees = |row, key| sees(seqlens, causal, [left, right], row, key);
                    for row in 0..seqlen_q {
                        let keys: Vec<usize> =
                            (0..seqlen_k).filter(|&key| sees(row, key)).collect();
                        assert_eq!(mask.keys_of_row(row).collect::<Vec<_>>(), keys);
                    }
                    for key in 0..seqlen_k {
                        let rows: Vec<usize> =
                            (0..seqlen_q).filter(|&row| sees(row, key)).collect();
                        let range = mask.rows_of_keys(key..key + 1);
                        assert_eq!(range.collect::<Vec<_>>(), rows, "key {key} of {mask:?}");
                    }
                    let all = (0..seqlen_q).all(|row| (0..seqlen_k).all(|key| sees(row, key)));
                    assert_eq!(mask.all_visible(0..seqlen_q, 0..seqlen_k), all);
                }
            }
        }
    }

    #[test]
    fn equal_masks_are_normalised_to_the_same_value() {
        let plain = Mask::new(9, 9, false, None, None);
        assert_eq!(Mask::new(9, 9, false, Some(8), Some(8)), plain);
        let causal = Mask::new(9, 9, true, None, None);
        assert_eq!(Mask::new(9, 9, false, Some(9), Some(0)), causal);
        assert_eq!(Mask::new(9, 9, true, None, Some(5)), causal);
        assert_eq!(
            Mask::new(1, 9, true, None, None),
            Mask::new(1, 9, false, None, None)
        );
    }
}
