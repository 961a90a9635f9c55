//! The first bytes that a real kubelet sends to a registration socket, written frame by frame.
//!
//! A gRPC client library of our own world would send `localhost` as `:authority`. Kubelet's client sends the
//! percent-encoded path of the socket, and an HTTP/2 server may reset such a stream. So the bytes are made here by
//! hand, and any other authority can be tried as well.

use std::io;
use std::path::Path;
use std::time::Duration;

use npu_proto::registration::PluginInfo;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
/// No frame of an honest answer is longer; a server may send 16384 bytes unless told otherwise.
const LONGEST_FRAME: usize = 16_384;

/// What came back for one request on one fresh connection.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// An HTTP response: its status, and the message if there was one.
    Response {
        /// The HTTP status.
        status: u16,
        /// The answer of `GetInfo`; absent when the response held no message.
        info: Option<PluginInfo>,
    },
    /// The stream was reset with this HTTP/2 error code (1 is `PROTOCOL_ERROR`).
    Reset(u32),
    /// The connection was given up with this HTTP/2 error code.
    GoAway(u32),
    /// The connection was closed without an answer.
    Closed,
}

/// The `:authority` that kubelet's gRPC client makes of a target: every byte is percent-encoded unless it may stand in
/// an authority as it is. A slash is encoded, an `@` is not.
#[must_use]
pub fn authority_of(target: &str) -> String {
    use std::fmt::Write as _;
    let mut authority = String::with_capacity(target.len() * 2);
    for byte in target.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&byte) {
            authority.push(char::from(byte));
        } else {
            let _ = write!(authority, "%{byte:02X}");
        }
    }
    authority
}

/// Calls `GetInfo` on `socket` as kubelet does, with the encoded path as authority.
///
/// # Errors
/// Connecting, writing or reading failed, the deadline passed, or the answer is no HTTP/2.
pub async fn get_info(socket: &Path, deadline: Duration) -> io::Result<Answer> {
    get_info_with(socket, &authority_of(&socket.to_string_lossy()), deadline).await
}

/// Calls `GetInfo` on `socket` with any authority.
///
/// # Errors
/// As [`get_info`].
pub async fn get_info_with(socket: &Path, authority: &str, deadline: Duration) -> io::Result<Answer> {
    tokio::time::timeout(deadline, exchange(socket, authority))
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, format!("no answer to GetInfo within {deadline:?}")))?
}

async fn exchange(socket: &Path, authority: &str) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket).await?;
    let mut bytes = PREFACE.to_vec();
    frame(&mut bytes, SETTINGS, 0, 0, &[]);
    let mut block = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/pluginregistration.Registration/GetInfo"),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("user-agent", "grpc-go/1.72.2"),
        ("te", "trailers"),
        ("grpc-timeout", "1S"),
    ] {
        header(&mut block, name, value);
    }
    frame(&mut bytes, HEADERS, END_HEADERS, 1, &block);
    // An empty InfoRequest: not compressed, zero bytes long.
    frame(&mut bytes, DATA, END_STREAM, 1, &[0, 0, 0, 0, 0]);
    stream.write_all(&bytes).await?;
    answer(&mut stream).await
}

async fn answer(stream: &mut UnixStream) -> io::Result<Answer> {
    let mut status = None;
    let mut body = Vec::new();
    loop {
        let mut head = [0_u8; 9];
        match stream.read_exact(&mut head).await {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Answer::Closed),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(Answer::Closed),
            Err(error) => return Err(error),
        }
        let length = usize::try_from(u32::from_be_bytes([0, head[0], head[1], head[2]])).unwrap_or(usize::MAX);
        let (kind, flags) = (head[3], head[4]);
        let id = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
        if length > LONGEST_FRAME {
            return Err(invalid(format!("a frame of {length} bytes")));
        }
        let mut payload = vec![0_u8; length];
        stream.read_exact(&mut payload).await?;
        match kind {
            SETTINGS if flags & ACK == 0 => {
                let mut ack = Vec::new();
                frame(&mut ack, SETTINGS, ACK, 0, &[]);
                stream.write_all(&ack).await?;
            }
            PING if flags & ACK == 0 => {
                let mut pong = Vec::new();
                frame(&mut pong, PING, ACK, 0, &payload);
                stream.write_all(&pong).await?;
            }
            RST_STREAM if id == 1 => return Ok(Answer::Reset(word(&payload, 0)?)),
            GOAWAY => return Ok(Answer::GoAway(word(&payload, 4)?)),
            // The first block holds the status; a later one is the trailers.
            HEADERS if id == 1 && status.is_none() => status = Some(status_of(&payload)?),
            DATA if id == 1 => body.extend_from_slice(&payload),
            _ => {}
        }
        if id == 1 && (kind == HEADERS || kind == DATA) && flags & END_STREAM != 0 {
            let status = status.ok_or_else(|| invalid("data before any headers".into()))?;
            let info = match body.get(5..) {
                Some(message) => Some(PluginInfo::decode(message).map_err(|error| invalid(error.to_string()))?),
                None => None,
            };
            return Ok(Answer::Response { status, info });
        }
    }
}

/// Appends one frame.
fn frame(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX).to_be_bytes();
    out.extend_from_slice(&length[1..]);
    out.extend_from_slice(&[kind, flags]);
    out.extend_from_slice(&stream.to_be_bytes());
    out.extend_from_slice(payload);
}

/// Appends a header as a literal that is not indexed, name and value without Huffman coding.
fn header(block: &mut Vec<u8>, name: &str, value: &str) {
    block.push(0);
    for text in [name, value] {
        let mut rest = text.len();
        if rest < 127 {
            block.push(u8::try_from(rest).unwrap_or(0));
        } else {
            block.push(127);
            rest -= 127;
            while rest >= 128 {
                block.push(u8::try_from(rest % 128 + 128).unwrap_or(0));
                rest /= 128;
            }
            block.push(u8::try_from(rest).unwrap_or(0));
        }
        block.extend_from_slice(text.as_bytes());
    }
}

/// The `:status` at the start of a header block: an entry of the static table, or its name with a plain value.
fn status_of(block: &[u8]) -> io::Result<u16> {
    // A change of the table's size may stand first.
    let start = block.iter().position(|byte| byte & 0xe0 != 0x20).unwrap_or(block.len());
    match block.get(start..).unwrap_or_default() {
        [0x88, ..] => Ok(200),
        [0x89, ..] => Ok(204),
        [0x8a, ..] => Ok(206),
        [0x8b, ..] => Ok(304),
        [0x8c, ..] => Ok(400),
        [0x8d, ..] => Ok(404),
        [0x8e, ..] => Ok(500),
        [0x08 | 0x18 | 0x48, 3, a, b, c, ..] if [a, b, c].iter().all(|digit| digit.is_ascii_digit()) => {
            Ok(u16::from(a - b'0') * 100 + u16::from(b - b'0') * 10 + u16::from(c - b'0'))
        }
        // "4xx" and the like in Huffman code: the class is all that this reader needs, and no server of ours sends it.
        other => Err(invalid(format!("headers that begin with {:02x?}", &other[..other.len().min(6)]))),
    }
}

fn word(payload: &[u8], at: usize) -> io::Result<u32> {
    let bytes = payload.get(at..at + 4).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
    bytes.map(u32::from_be_bytes).ok_or_else(|| invalid("a frame that is cut short".into()))
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::{authority_of, header};

    #[test]
    fn an_authority_is_encoded_as_kubelets_client_does_it() {
        assert_eq!(
            authority_of("/var/lib/kubelet/plugins_registry/npu.huawei.com@reg.sock"),
            "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fnpu.huawei.com@reg.sock"
        );
        assert_eq!(authority_of("/a b"), "%2Fa%20b");
    }

    #[test]
    fn a_long_header_value_has_its_length_in_several_bytes() {
        let mut block = Vec::new();
        header(&mut block, "n", &"v".repeat(300));
        // 300 = 127 + 173; 173 = 45 + 128 · 1.
        assert_eq!(&block[..6], &[0, 1, b'n', 127, 173, 1]);
        assert_eq!(block.len(), 6 + 300);
    }
}
