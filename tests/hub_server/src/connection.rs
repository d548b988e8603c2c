//! One connection: reads requests, writes answers, breaks what a fault says.

use std::{
    io::{self, BufReader, Write},
    net::{Shutdown, TcpStream},
    os::fd::AsRawFd,
    thread,
    time::{Duration, Instant},
};

use crate::{
    Request,
    answer::{Answer, Ending, Framing, Instead},
    server::{Host, Shared},
};

const BLOCK: usize = 256 << 10;

/// Serves one connection to its end.
pub(crate) fn serve(stream: &TcpStream, host: Host, shared: &Shared) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    while let Some(request) = Request::read(&mut reader, host == Host::Blobs)? {
        let (number, answer) = shared.admit(request.clone())?;
        let writer = Writer { stream, shared, number };
        match writer.write(&answer, &request)? {
            Next::Request => {}
            Next::Close => break,
            Next::Reset => return reset_at_close(stream),
        }
    }
    stream.shutdown(Shutdown::Both)
}

/// What becomes of the connection after an answer.
enum Next {
    Request,
    Close,
    Reset,
}

struct Writer<'a> {
    stream: &'a TcpStream,
    shared: &'a Shared,
    number: usize,
}

impl Writer<'_> {
    fn write(&self, answer: &Answer, request: &Request) -> io::Result<Next> {
        let mut stream = self.stream;
        match answer.delivery.instead {
            Some(Instead::Reset) => return Ok(Next::Reset),
            Some(Instead::Silence(time)) => {
                self.shared.pause(time);
                return Ok(Next::Close);
            }
            Some(Instead::NotHttp) => {
                stream.write_all(b"220 mail.example.org ready\r\n\r\n")?;
                return Ok(Next::Close);
            }
            None => {}
        }
        let lying = answer.header("Content-Length").is_some();
        let asked = request.header("connection").is_none_or(|value| !value.eq_ignore_ascii_case("close"));
        let keep = asked
            && !lying
            && answer.delivery.framing != Framing::Connection
            && answer.delivery.end.is_none();
        stream.write_all(head(answer, keep).as_bytes())?;
        let (length, ending) = answer.delivery.end.unwrap_or((answer.length(), Ending::InOrder));
        if request.method != "HEAD" {
            self.body(answer, length)?;
        }
        match ending {
            Ending::Reset => drain(stream).map(|()| Next::Reset),
            Ending::InOrder => Ok(if keep { Next::Request } else { Next::Close }),
        }
    }

    fn body(&self, answer: &Answer, length: u64) -> io::Result<()> {
        let pace = answer.delivery.pace.or_else(|| self.shared.pace());
        let chunks = answer.delivery.framing == Framing::Chunks;
        let mut stream = self.stream;
        let mut block = vec![0; pace.map_or(BLOCK, |(bytes, _)| bytes.min(BLOCK))];
        let mut done = 0;
        while done < length {
            let count = (length - done).min(block.len() as u64) as usize;
            let bytes = &mut block[..count];
            answer.content.read_at(answer.part.0 + done, bytes)?;
            if let Some(at) =
                answer.delivery.flip.and_then(|at| at.checked_sub(done)).filter(|at| *at < count as u64)
            {
                bytes[at as usize] ^= 1;
            }
            if chunks {
                write!(stream, "{count:x}\r\n")?;
            }
            self.count(bytes)?;
            if chunks {
                stream.write_all(b"\r\n")?;
            }
            done += count as u64;
            if let Some((_, pause)) = pace {
                self.shared.pause(pause);
            }
        }
        if chunks && done == answer.length() {
            stream.write_all(b"0\r\n\r\n")?;
        }
        Ok(())
    }

    /// Writes, and counts what was written. It counts before it writes, so that whoever has the last byte finds it
    /// counted; what could not be written is taken off again.
    fn count(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = self.stream;
        self.shared.add_bytes(self.number, bytes.len() as i64);
        let mut rest = bytes;
        while !rest.is_empty() {
            match stream.write(rest) {
                Ok(written) if written > 0 => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => {
                    self.shared.add_bytes(self.number, -(rest.len() as i64));
                    return other.and(Err(io::ErrorKind::WriteZero.into()));
                }
            }
        }
        Ok(())
    }
}

fn head(answer: &Answer, keep: bool) -> String {
    let mut head = format!("HTTP/1.1 {} {}\r\n", answer.status, reason(answer.status));
    let mut line = |name: &str, value: &str| head.push_str(&format!("{name}: {value}\r\n"));
    for (name, value) in &answer.headers {
        line(name, value);
    }
    match answer.delivery.framing {
        Framing::Length if answer.header("Content-Length").is_none() => {
            line("Content-Length", &answer.length().to_string());
        }
        Framing::Chunks => line("Transfer-Encoding", "chunked"),
        Framing::Length | Framing::Connection => {}
    }
    line("Connection", if keep { "keep-alive" } else { "close" });
    head + "\r\n"
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        206 => "Partial Content",
        302 => "Found",
        307 => "Temporary Redirect",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        416 => "Range Not Satisfiable",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Unnamed",
    }
}

/// Waits until the other side has what was written: a reset throws away what is still on its way.
fn drain(stream: &TcpStream) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let mut waiting: libc::c_int = 0;
        // SAFETY: the descriptor is open as long as `stream`, and TIOCOUTQ writes one int.
        let code = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) };
        if code != 0 {
            return Err(io::Error::last_os_error());
        }
        if waiting == 0 || start.elapsed() > Duration::from_secs(2) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Makes the close of the socket a reset.
fn reset_at_close(stream: &TcpStream) -> io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: the descriptor is open as long as `stream`, and the option's value is a `linger` of that size.
    let code = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as libc::socklen_t,
        )
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
