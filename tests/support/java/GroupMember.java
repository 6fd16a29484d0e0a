// A member of a consumer group on Kafka's own client. It prints what it owns and what it processes, one line each.
// Arguments: bootstrap servers, group, topic, group protocol. SIGTERM makes it commit and leave.

import java.time.Duration;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.stream.Collectors;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.WakeupException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class GroupMember {
    public static void main(String[] arguments) throws Exception {
        String bytes = ByteArrayDeserializer.class.getName();
        var consumer = new KafkaConsumer<byte[], byte[]>(Map.of(
            "bootstrap.servers", arguments[0],
            "group.id", arguments[1],
            "group.protocol", arguments[3],
            "auto.offset.reset", "earliest",
            "enable.auto.commit", "false",
            "key.deserializer", bytes,
            "value.deserializer", bytes));
        var owned = new TreeSet<Integer>();
        var main = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            consumer.wakeup();
            try {
                main.join();
            } catch (InterruptedException ignored) {
                // The process ends in any case.
            }
        }));
        consumer.subscribe(List.of(arguments[2]), new ConsumerRebalanceListener() {
            public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
                partitions.forEach(at -> owned.add(at.partition()));
                print();
            }

            public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
                partitions.forEach(at -> owned.remove(at.partition()));
                print();
            }

            public void onPartitionsLost(Collection<TopicPartition> partitions) {
                System.out.println("lost");
                onPartitionsRevoked(partitions);
            }

            private void print() {
                System.out.println("owns " + owned.stream().map(String::valueOf).collect(Collectors.joining(",")));
            }
        });
        try {
            while (true) {
                for (var record : consumer.poll(Duration.ofMillis(100))) {
                    System.out.println("record " + record.partition() + "/" + record.offset());
                }
                consumer.commitSync();
            }
        } catch (WakeupException end) {
            consumer.close();
        }
    }
}
