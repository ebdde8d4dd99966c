//! The longest context that a search finds.

use anyhow::Result;

/// What a search came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The longest that fits; nothing if not even the shortest does.
    pub seqlen: Option<usize>,
    /// Every length up to where the search ends fits: a longer one may too.
    pub ended_at_most: bool,
}

/// The largest multiple of `unit` up to `most` for which `fits` is true, if it is for `unit`: doubled until it is not,
/// then halved in between. `fits` has to be false from some length on.
pub fn longest(
    unit: usize,
    most: usize,
    mut fits: impl FnMut(usize) -> Result<bool>,
) -> Result<Found> {
    // In units: the longest known to fit, the shortest known not to, or beyond the end.
    let units = most / unit;
    let (mut good, mut bad) = (0, units + 1);
    while bad - good > 1 {
        let next = match bad > units {
            true => (2 * good).clamp(1, units),
            false => good + (bad - good) / 2,
        };
        match fits(next * unit)? {
            true => good = next,
            false => bad = next,
        }
    }
    Ok(Found {
        seqlen: (good > 0).then_some(good * unit),
        ended_at_most: good == units,
    })
}
