//! The longest context that a search finds.

use anyhow::Result;

/// The largest multiple of `unit` up to `most` for which `fits` is true, if it is for `unit`: doubled until it is not,
/// then halved in between. `fits` has to be false from some length on.
pub fn longest(
    unit: usize,
    most: usize,
    mut fits: impl FnMut(usize) -> Result<bool>,
) -> Result<Option<usize>> {
    let units = most / unit;
    if units == 0 || !fits(unit)? {
        return Ok(None);
    }
    // In units: the longest known to fit, the shortest known not to.
    let mut good = 1;
    let mut bad = loop {
        let next = (2 * good).min(units + 1);
        if next > units || !fits(next * unit)? {
            break next;
        }
        good = next;
    };
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        match fits(middle * unit)? {
            true => good = middle,
            false => bad = middle,
        }
    }
    Ok(Some(good * unit))
}
