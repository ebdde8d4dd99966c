//! Whole numbers of the command lines.

/// Reads a number of things of which there must be one.
pub fn at_least_one(value: &str) -> Result<usize, String> {
    match value.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("expected a whole number of at least 1".to_string()),
    }
}

/// Reads a number of things of which there may be none.
pub fn at_least_zero(value: &str) -> Result<usize, String> {
    value
        .parse()
        .map_err(|_| "expected a whole number of at least 0".to_string())
}
