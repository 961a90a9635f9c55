//! What stands around everything that is stored: a checksum, the format's version, and who wrote it.
//!
//! A file is one JSON object in one line. It begins with its checksum, which covers every byte after it, the version
//! included: a flipped bit can never look like a newer format.
//!
//! ```text
//! {"checksum":"crc32:1a2b3c4d","body":{…},"format":1,"writer":"npu-dra 0.1.0"}⏎
//!                             └──────────────── covered ──────────────────────┘
//! ```
//!
//! The first 28 bytes keep their meaning in every format to come.

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

/// The format that this version writes, and the newest that it reads.
pub(super) const FORMAT: u32 = 1;
/// Who writes.
const WRITER: &str = concat!("npu-dra ", env!("CARGO_PKG_VERSION"));
const PREFIX: &[u8] = b"{\"checksum\":\"crc32:";

/// Why stored bytes could not be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// Of a format to come.
    Newer { format: u32, writer: String },
    /// Damaged; the text says how.
    Damaged(String),
}

#[derive(Deserialize)]
struct Stored<T> {
    format: u32,
    body: T,
}

#[derive(Deserialize)]
struct Header {
    format: u32,
    writer: String,
}

/// Takes the body out of stored bytes.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Unreadable> {
    if bytes.is_empty() {
        return Err(Unreadable::Damaged("the file is empty".to_owned()));
    }
    let sound = match check(bytes) {
        Ok(()) => true,
        Err(Unsound::Absent) => false,
        // A checksum that is there and wrong means damage, whatever the rest says.
        Err(Unsound::Mismatch(why)) => return Err(Unreadable::Damaged(why)),
    };
    let problem = match serde_json::from_slice::<Stored<T>>(bytes) {
        Ok(stored) if sound && stored.format == FORMAT => return Ok(stored.body),
        other => other.err(),
    };
    let header = serde_json::from_slice::<Header>(bytes);
    Err(match (header, problem) {
        (Ok(Header { format, writer }), _) if format > FORMAT => Unreadable::Newer { format, writer },
        _ if !sound => Unreadable::Damaged("it does not begin with a checksum".to_owned()),
        (Ok(Header { writer, .. }), Some(error)) => Unreadable::Damaged(format!("{error}; it was written by {writer}")),
        (Ok(Header { format, writer }), None) => Unreadable::Damaged(format!("format {format} of {writer} is unknown")),
        (Err(error), _) => Unreadable::Damaged(error.to_string()),
    })
}

/// Puts a body into stored bytes. What the bytes before held and this version does not know is kept.
///
/// `identity` names the field by which the objects of an array are told apart.
pub(super) fn encode<T: Serialize + DeserializeOwned>(
    body: &T,
    before: Option<&[u8]>,
    identity: &str,
) -> serde_json::Result<Vec<u8>> {
    let mut new = serde_json::to_value(body)?;
    let mut envelope = Map::new();
    if let Some(before) = before
        && let Ok(known) = decode::<T>(before)
        && let Ok(Value::Object(mut raw)) = serde_json::from_slice(before)
    {
        raw.remove("checksum");
        keep_unknown(&mut new, &raw["body"], &serde_json::to_value(&known)?, identity);
        envelope = raw;
    }
    envelope.insert("format".to_owned(), FORMAT.into());
    envelope.insert("writer".to_owned(), WRITER.into());
    envelope.insert("body".to_owned(), new);
    let text = serde_json::to_string(&envelope)?;
    let covered = format!("\",{}\n", text.strip_prefix('{').unwrap_or(&text));
    let mut bytes = PREFIX.to_vec();
    bytes.extend_from_slice(format!("{:08x}", crc32fast::hash(covered.as_bytes())).as_bytes());
    bytes.extend_from_slice(covered.as_bytes());
    Ok(bytes)
}

enum Unsound {
    Absent,
    Mismatch(String),
}

fn check(bytes: &[u8]) -> Result<(), Unsound> {
    let rest = bytes.strip_prefix(PREFIX).ok_or(Unsound::Absent)?;
    let (stored, covered) = rest.split_at_checked(8).ok_or_else(|| Unsound::Mismatch("it is cut off".to_owned()))?;
    let computed = format!("{:08x}", crc32fast::hash(covered));
    if stored == computed.as_bytes() {
        return Ok(());
    }
    let stored = String::from_utf8_lossy(stored);
    Err(Unsound::Mismatch(format!(
        "its checksum is {computed} and should be {stored}: it was changed or cut off after it was written"
    )))
}

/// Copies into `new` what `raw` holds beyond `known`, where `known` is what this version understood of `raw`.
fn keep_unknown(new: &mut Value, raw: &Value, known: &Value, identity: &str) {
    match (new, raw, known) {
        (Value::Object(new), Value::Object(raw), Value::Object(known)) => {
            for (key, raw) in raw {
                match (new.get_mut(key), known.get(key)) {
                    (Some(new), Some(known)) => keep_unknown(new, raw, known, identity),
                    (None, None) => {
                        new.insert(key.clone(), raw.clone());
                    }
                    _ => {}
                }
            }
        }
        (Value::Array(new), Value::Array(raw), Value::Array(known)) if raw.len() == known.len() => {
            for new in new {
                let Some(id) = new.get(identity).cloned() else { continue };
                if let Some(index) = known.iter().position(|known| known.get(identity) == Some(&id)) {
                    keep_unknown(new, &raw[index], &known[index], identity);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    struct Part {
        id: String,
        size: Option<u32>,
    }

    #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
    struct Body {
        name: String,
        parts: Vec<Part>,
    }

    fn body(parts: &[&str]) -> Body {
        let parts = parts.iter().map(|id| Part { id: (*id).to_owned(), size: None }).collect();
        Body { name: "a".to_owned(), parts }
    }

    fn seal(value: &Value) -> Vec<u8> {
        let covered = format!("\",{}\n", &value.to_string()[1..]);
        format!("{{\"checksum\":\"crc32:{:08x}{covered}", crc32fast::hash(covered.as_bytes())).into_bytes()
    }

    #[test]
    fn what_is_stored_is_one_json_object_that_reads_back() {
        let bytes = encode(&body(&["x"]), None, "id").unwrap();
        assert_eq!(decode::<Body>(&bytes), Ok(body(&["x"])));
        let value: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(value["format"], 1);
        assert_eq!(value["writer"], WRITER);
        assert_eq!(value["body"]["parts"][0], json!({"id": "x", "size": null}));
        assert_eq!(bytes, seal(&json!({"format": 1, "writer": WRITER, "body": body(&["x"])})));
    }

    #[test]
    fn unknown_fields_of_every_level_survive_a_rewrite_and_known_ones_do_not() {
        let before = seal(&json!({
            "format": 1, "writer": "npu-dra 0.1.9", "signature": "s",
            "body": {
                "name": "old", "colour": "red",
                "parts": [{"id": "gone", "size": 1, "note": "g"}, {"id": "x", "size": 2, "note": {"deep": [1]}}],
            },
        }));
        let bytes = encode(&body(&["new", "x"]), Some(&before), "id").unwrap();
        let value: Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(value["signature"], "s");
        assert_eq!(value["writer"], WRITER);
        let expected = json!({
            "name": "a", "colour": "red",
            "parts": [{"id": "new", "size": null}, {"id": "x", "size": null, "note": {"deep": [1]}}],
        });
        assert_eq!(value["body"], expected);
        assert_eq!(decode::<Body>(&bytes), Ok(body(&["new", "x"])));
        assert_eq!(encode(&body(&["new", "x"]), Some(&bytes), "id").unwrap(), bytes, "a rewrite is stable");
    }

    #[test]
    fn a_damaged_file_before_is_simply_replaced() {
        let plain = encode(&body(&[]), None, "id").unwrap();
        assert_eq!(encode(&body(&[]), Some(b"{}"), "id").unwrap(), plain);
        assert_eq!(encode(&body(&[]), Some(b""), "id").unwrap(), plain);
    }

    #[test]
    fn a_newer_format_names_its_writer_even_if_its_body_or_checksum_is_another() {
        let newer = Err(Unreadable::Newer { format: 2, writer: "npu-dra 9".to_owned() });
        let value = json!({"format": 2, "writer": "npu-dra 9", "body": 7});
        assert_eq!(decode::<Body>(&seal(&value)), newer);
        assert_eq!(decode::<Body>(value.to_string().as_bytes()), newer);
        let same_body = json!({"format": 2, "writer": "npu-dra 9", "body": body(&[])});
        assert_eq!(decode::<Body>(&seal(&same_body)), newer);
        assert_eq!(decode::<Body>(same_body.to_string().as_bytes()), newer);
    }

    #[test]
    fn damage_is_told_apart() {
        let why = |bytes: &[u8]| match decode::<Body>(bytes) {
            Err(Unreadable::Damaged(why)) => why,
            other => panic!("{other:?}"),
        };
        assert_eq!(why(b""), "the file is empty");
        assert_eq!(why(b"{\"format\":1}"), "it does not begin with a checksum");
        assert_eq!(why(b"\0\0\0"), "it does not begin with a checksum");
        assert_eq!(why(b"{\"checksum\":\"crc32:12"), "it is cut off");
        assert!(why(b"{\"checksum\":\"crc32:00000000\",\"format\":2,\"writer\":\"x\"}").contains("its checksum is"));
        let lacks = why(&seal(&json!({"format": 1, "writer": "npu-dra 0.1.9", "body": {"name": "a"}})));
        assert!(lacks.contains("missing field `parts`") && lacks.contains("written by npu-dra 0.1.9"), "{lacks}");
        let old = why(&seal(&json!({"format": 0, "writer": "npu-dra 0", "body": body(&[])})));
        assert_eq!(old, "format 0 of npu-dra 0 is unknown");
    }

    proptest! {
        #[test]
        fn a_flipped_bit_or_a_cut_anywhere_is_damage(at in any::<prop::sample::Index>(), bit in 0_u8..8, cut: bool) {
            let mut bytes = encode(&body(&["x", "y"]), None, "id").unwrap();
            let index = at.index(bytes.len());
            if cut {
                bytes.truncate(index);
            } else {
                bytes[index] ^= 1 << bit;
            }
            prop_assert!(matches!(decode::<Body>(&bytes), Err(Unreadable::Damaged(_))), "{:?}", decode::<Body>(&bytes));
        }
    }
}
