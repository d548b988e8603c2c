//! What controls do to a boundary tensor. Values are altered as f32, which holds every id and every token.

use viaduct_export::gates::Alteration;

use super::{Oracle, VerifyError};
use crate::tensor::{HostTensor, Sums};

/// Share of a channel's variance that its scale and shift may leave unexplained.
const UNEXPLAINED: f64 = 1e-3;

/// Why a control cannot be planted in this request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Impossible {
    #[error("the reference has no {0}")]
    NoReference(String),
    #[error("the run has no {0}")]
    NoBoundary(String),
    #[error("the report has no row {0} by the measure {1}")]
    NoRow(String, &'static str),
    #[error("it comes between two runs of one stage, where none can be planted")]
    WithinStage,
    #[error("nothing goes on from it: the run only shows it")]
    OnlyShown,
    #[error("{0}")]
    Failed(String),
    #[error("it has no axis or column {0}")]
    NoPlace(usize),
    #[error("{0} does not fit it")]
    Shape(String),
    #[error("{0} is no scale and shift of its channels")]
    NoMap(String),
    #[error("it changes nothing here")]
    NoChange,
    #[error("not told from quantisation in this profile")]
    Excepted,
}

/// Why a boundary was not altered.
#[derive(Debug, thiserror::Error)]
pub enum AlterationError {
    #[error(transparent)]
    Reference(#[from] VerifyError),
    #[error(transparent)]
    Impossible(#[from] Impossible),
}

/// The altered tensor; `padding` says which rows of the text are.
pub fn altered(
    how: &Alteration,
    tensor: &HostTensor,
    oracle: &Oracle,
    padding: &[bool],
) -> Result<HostTensor, AlterationError> {
    let values = tensor.to_f32();
    let reference = |name: &String| {
        let reference = oracle.tensor(name)?;
        reference.ok_or_else(|| AlterationError::from(Impossible::NoReference(name.clone())))
    };
    let values = match how {
        Alteration::Zeros => vec![0.0; values.len()],
        Alteration::Ones => vec![1.0; values.len()],
        Alteration::ZeroPadding => zero_padding(values, padding),
        Alteration::Roll(axis) => rolled(&values, &tensor.shape, *axis)?,
        Alteration::Swap(columns) => swapped(values, &tensor.shape, *columns)?,
        Alteration::Replace(name) => replaced(tensor, &reference(name)?, name)?,
        Alteration::Repeat(name) => mapped(tensor, &reference(name)?, name, Way::Forth)?,
        Alteration::Undo(name) => mapped(tensor, &reference(name)?, name, Way::Back)?,
    };
    let altered = HostTensor::f32(&tensor.shape, values).as_type(tensor.values.dtype());
    if altered == *tensor { Err(Impossible::NoChange.into()) } else { Ok(altered) }
}

fn replaced(tensor: &HostTensor, other: &HostTensor, name: &str) -> Result<Vec<f32>, Impossible> {
    if other.shape == tensor.shape { Ok(other.to_f32()) } else { Err(Impossible::Shape(name.to_owned())) }
}

fn zero_padding(mut values: Vec<f32>, padding: &[bool]) -> Vec<f32> {
    let width = (values.len() / padding.len().max(1)).max(1);
    let rows = values.chunks_mut(width).zip(padding);
    rows.filter(|(_, is_padding)| **is_padding).for_each(|(row, _)| row.fill(0.0));
    values
}

/// What was at one place of the axis is at the next one, and what was at the last at the first.
fn rolled(values: &[f32], shape: &[usize], axis: usize) -> Result<Vec<f32>, Impossible> {
    let length = *shape.get(axis).ok_or(Impossible::NoPlace(axis))?;
    let inner: usize = shape[axis + 1..].iter().product();
    let source = |index: usize| {
        let (block, place) = (index / (length * inner), index / inner % length);
        (block * length + (place + length - 1) % length) * inner + index % inner
    };
    Ok((0..values.len()).map(|index| values[source(index)]).collect())
}

fn swapped(mut values: Vec<f32>, shape: &[usize], [a, b]: [usize; 2]) -> Result<Vec<f32>, Impossible> {
    let width = shape.last().copied().unwrap_or(0);
    if let Some(beyond) = [a, b].into_iter().find(|column| *column >= width) {
        return Err(Impossible::NoPlace(beyond));
    }
    values.chunks_mut(width).for_each(|row| row.swap(a, b));
    Ok(values)
}

/// Whether a map is applied or undone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Forth,
    Back,
}

/// A channel's scale and shift.
type Map = (f64, f64);

/// The tensor once more through the maps that lead from it to another one, or back through them.
fn mapped(tensor: &HostTensor, to: &HostTensor, name: &str, way: Way) -> Result<Vec<f32>, Impossible> {
    let shape = || Impossible::Shape(name.to_owned());
    let (from, to) = (Channels::of(tensor).ok_or_else(shape)?, Channels::of(to).ok_or_else(shape)?);
    let to = to.folded(from.count).filter(|to| to.tokens() == from.tokens()).ok_or_else(shape)?;
    let maps = (0..from.count).map(|channel| map(&from, &to, channel)).collect::<Option<Vec<Map>>>();
    let maps = maps.ok_or_else(|| Impossible::NoMap(name.to_owned()))?;
    let moved = |(index, value): (usize, f32)| {
        let ((scale, shift), value) = (maps[from.channel_of(index)], f64::from(value));
        (if way == Way::Back { (value - shift) / scale } else { value * scale + shift }) as f32
    };
    Ok(tensor.to_f32().into_iter().enumerate().map(moved).collect())
}

/// By least squares; none where no scale and shift explain the channel.
fn map(from: &Channels, to: &Channels, channel: usize) -> Option<Map> {
    let tokens = from.tokens();
    let value = |of: &Channels, token| f64::from(of.values[of.index(token, channel)]);
    let mean = |of: &Channels| (0..tokens).map(|token| value(of, token)).sum::<f64>() / tokens as f64;
    let (x_mean, y_mean) = (mean(from), mean(to));
    let mut sums = Sums::default();
    (0..tokens).for_each(|token| sums.add(value(from, token) - x_mean, value(to, token) - y_mean));
    let scale = sums.ab / sums.aa;
    let unexplained = sums.bb - scale * sums.ab;
    // Written so that NaN is no map.
    let explains = scale != 0.0 && unexplained <= UNEXPLAINED * sums.bb;
    explains.then_some((scale, y_mean - scale * x_mean))
}

/// A tensor as channels of tokens: [1, tokens, channels], or planes [1, channels, rows, columns] of which each token may take a
/// square of `fold` pixels a side, a channel for every pixel of the square.
struct Channels {
    values: Vec<f32>,
    count: usize,
    /// Rows and columns of pixels, for planes.
    plane: Option<[usize; 2]>,
    fold: usize,
}

impl Channels {
    fn of(tensor: &HostTensor) -> Option<Channels> {
        let (count, plane) = match tensor.shape[..] {
            [1, _, channels] => (channels, None),
            [1, channels, rows, columns] | [1, channels, 1, rows, columns] => {
                (channels, Some([rows, columns]))
            }
            _ => return None,
        };
        let values = tensor.to_f32();
        (!values.is_empty()).then_some(Channels { values, count, plane, fold: 1 })
    }

    /// The same with squares of pixels laid into so many channels.
    fn folded(self, count: usize) -> Option<Channels> {
        let fold = (1..=count).take_while(|fold| self.count * fold * fold <= count).last()?;
        let whole = |[rows, columns]: [usize; 2]| rows.is_multiple_of(fold) && columns.is_multiple_of(fold);
        let fits = self.count * fold * fold == count && (fold == 1 || self.plane.is_some_and(whole));
        fits.then_some(Channels { count, fold, ..self })
    }

    fn tokens(&self) -> usize {
        self.values.len() / self.count
    }

    /// Where a token's channel lies.
    fn index(&self, token: usize, channel: usize) -> usize {
        let Some([rows, columns]) = self.plane else { return token * self.count + channel };
        let (fold, wide) = (self.fold, columns / self.fold);
        let (plane, pixel) = (channel / (fold * fold), channel % (fold * fold));
        let (row, column) = (token / wide * fold + pixel / fold, token % wide * fold + pixel % fold);
        (plane * rows + row) * columns + column
    }

    /// The channel of a value that is not folded.
    fn channel_of(&self, index: usize) -> usize {
        match self.plane {
            Some([rows, columns]) => index / (rows * columns),
            None => index % self.count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(shape: &[usize], values: &[f32]) -> HostTensor {
        HostTensor::f32(shape, values.to_vec())
    }

    #[test]
    fn rows_and_columns_move() {
        let values: Vec<f32> = (0..6).map(|x| x as f32).collect();
        assert_eq!(rolled(&values, &[1, 2, 3], 2).unwrap(), [2.0, 0.0, 1.0, 5.0, 3.0, 4.0]);
        assert_eq!(rolled(&values, &[1, 2, 3], 1).unwrap(), [3.0, 4.0, 5.0, 0.0, 1.0, 2.0]);
        assert_eq!(rolled(&values, &[6], 1), Err(Impossible::NoPlace(1)));
        assert_eq!(rolled(&[], &[1, 0, 3], 1).unwrap(), Vec::<f32>::new());
        assert_eq!(swapped(values.clone(), &[2, 3], [0, 2]).unwrap(), [2.0, 1.0, 0.0, 5.0, 4.0, 3.0]);
        assert_eq!(swapped(values.clone(), &[2, 3], [0, 3]), Err(Impossible::NoPlace(3)));
        assert_eq!(zero_padding(values, &[false, true, true]), [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    }

    /// Four channels of two tokens, which the other tensor has as one plane of 2 x 4 pixels.
    #[test]
    fn a_map_is_found_applied_and_undone() {
        let tokens = of(&[1, 2, 4], &[1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0, 11.0]);
        let scales = [(2.0, 1.0), (0.5, 0.0), (-1.0, 3.0), (3.0, -2.0)];
        let pixel = |token: usize, channel: usize| {
            let (scale, shift) = scales[channel];
            scale * tokens.values.f32_at(token * 4 + channel) + shift
        };
        let plane = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
            .map(|[token, channel]| pixel(token, channel));
        let planes = of(&[1, 1, 2, 4], &plane);
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4);
        let repeated = mapped(&tokens, &planes, "planes", Way::Forth).unwrap();
        let once: Vec<f32> = (0..8).map(|index| pixel(index / 4, index % 4)).collect();
        assert!(near(&repeated, &once), "{repeated:?}");
        let undone = mapped(&of(&[1, 2, 4], &once), &planes, "planes", Way::Back).unwrap();
        assert!(near(&undone, &once), "of itself nothing is undone: {undone:?}");
        let back = mapped(&tokens, &planes, "planes", Way::Back).unwrap();
        let twice = mapped(&of(&[1, 2, 4], &back), &tokens, "tokens", Way::Forth).unwrap();
        assert!(near(&twice, tokens.to_f32().as_slice()), "{twice:?}");
    }

    #[test]
    fn what_is_no_map_is_refused() {
        let tokens = of(&[1, 3, 1], &[1.0, 2.0, 3.0]);
        let refused = |to: &HostTensor| mapped(&tokens, to, "to", Way::Forth).unwrap_err();
        assert_eq!(refused(&of(&[1, 3, 1], &[1.0, 4.0, 9.0])), Impossible::NoMap("to".to_owned()));
        assert_eq!(refused(&of(&[1, 3, 1], &[1.0; 3])), Impossible::NoMap("to".to_owned()));
        assert_eq!(refused(&of(&[1, 3, 1], &[f32::NAN; 3])), Impossible::NoMap("to".to_owned()));
        for shape in [&[1, 2, 1][..], &[2], &[1, 1, 2, 3], &[1, 3, 2]] {
            assert_eq!(
                refused(&of(shape, &vec![1.0; shape.iter().product()])),
                Impossible::Shape("to".to_owned())
            );
        }
    }
}
