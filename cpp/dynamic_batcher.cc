#include "dynamic_batcher.h"

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "concatenate.h"
#include "errors.h"

namespace torchbeast {
namespace {

void throw_dropped() {
  throw AsyncError(
      "The associated promise has been destructed prior to the associated state becoming ready.");
}

void throw_closed() { throw ClosedBatchingQueue("Batching queue closed during compute"); }

}  // namespace

Batch::Batch(std::vector<Piece> pieces, ArrayNest inputs, std::int64_t batch_dim, BufferPool pool)
    : pieces_(std::move(pieces)),
      inputs_(std::move(inputs)),
      batch_dim_(batch_dim),
      pool_(std::move(pool)),
      num_rows_(count_rows(inputs_, batch_dim)) {}

Batch::~Batch() {
  for (const Piece& piece : pieces_) piece.item->set_exception(throw_dropped);
}

void Batch::check(const Array& output) const {
  if (output.ndim() <= batch_dim_) {
    throw std::invalid_argument("With batch dimension " + std::to_string(batch_dim_) +
                                ", output shape must have at least " +
                                std::to_string(batch_dim_ + 1) + " dimensions, but got " +
                                to_string(output.shape));
  }
  const std::int64_t num_rows = output.shape[static_cast<std::size_t>(batch_dim_)];
  if (num_rows != num_rows_) {
    throw std::invalid_argument(
        "Output shape must have the same batch dimension as the input batch size. Expected: " +
        std::to_string(num_rows_) + ". Observed: " + std::to_string(num_rows) + ".");
  }
}

std::vector<Batch::Piece> Batch::claim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pieces_.empty()) throw std::runtime_error("set_outputs called twice");
  return std::move(pieces_);
}

void Batch::set_outputs(ArrayNest outputs) {
  for (const Array& output : outputs.leaves) check(output);
  const auto shared = std::make_shared<const ArrayNest>(std::move(outputs));
  std::int64_t batch_row = 0;
  for (const Piece& piece : claim()) {
    const std::int64_t num_rows = piece.end - piece.begin;
    piece.item->set_outputs(shared, batch_row, piece.begin, num_rows, batch_dim_, pool_);
    batch_row += num_rows;
  }
}

void Batch::set_exception(const Throw& error) {
  for (const Piece& piece : claim()) piece.item->set_exception(error);
}

DynamicBatcher::Call::Call(DynamicBatcher& batcher, std::shared_ptr<Request> request)
    : batcher_(batcher), request_(std::move(request)) {
  const std::lock_guard<std::mutex> lock(batcher_.mutex_);
  batcher_.called_.insert(request_.get());
}

DynamicBatcher::Call::~Call() {
  request_->forget();
  const std::lock_guard<std::mutex> lock(batcher_.mutex_);
  batcher_.called_.erase(request_.get());
}

std::unique_ptr<DynamicBatcher::Call> DynamicBatcher::call(ArrayNest inputs, const Poll& poll,
                                                           OnAnswer on_answer,
                                                           std::int64_t client) {
  const std::int64_t num_rows = count_rows(inputs, queue_.batch_dim());
  const auto request =
      std::make_shared<Request>(std::move(inputs), num_rows, client, std::move(on_answer));
  auto call = std::make_unique<Call>(*this, request);
  queue_.push(request, poll);
  return call;
}

std::unique_ptr<Batch> DynamicBatcher::get_batch(const Poll& poll) {
  auto pieces = queue_.pop(poll);
  if (pieces.empty()) return nullptr;
  const std::int64_t batch_dim = queue_.batch_dim();
  try {
    ArrayNest inputs = concatenate(queue_.rows_of(pieces), batch_dim, pool_);
    return std::make_unique<Batch>(std::move(pieces), std::move(inputs), batch_dim, pool_);
  } catch (...) {  // Most likely out of memory: the callers must get the error, too.
    const Throw error = [e = std::current_exception()] { std::rethrow_exception(e); };
    for (const Batch::Piece& piece : pieces) piece.item->set_exception(error);
    throw;
  }
}

void DynamicBatcher::close() {
  queue_.close();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Request* request : called_) request->set_exception(throw_closed);
}

}  // namespace torchbeast
