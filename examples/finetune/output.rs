//! What a run prints, which is not what it is for.

use std::io::{ErrorKind, Result, Write};

/// Drops what is written once nobody reads it any more, as in `finetune | head`: the run goes on.
pub struct Output<W>(pub W);

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        match self.0.write(bytes) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(bytes.len()),
            written => written,
        }
    }

    fn flush(&mut self) -> Result<()> {
        match self.0.flush() {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            flushed => flushed,
        }
    }
}
